import pytest
import torch
from torch.nn import functional

from serving_demo import model as transformer
from serving_demo.model import Model, same_bits_every_time

PROMPT = b"The quick brown fox jumps over the lazy dog, again and again."
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(autouse=True)
def _same_bits():
    with same_bits_every_time():
        yield


def make_model(device="cpu", seed=0):
    return Model(block_size=16, max_blocks=6, seed=seed, device=torch.device(device))


def logits_of(model, prompt, new_tokens, cache, blocks):
    """Logits of each step of greedy decoding, [new_tokens, vocabulary]."""
    table = torch.tensor(model.padded(blocks), device=model.device)
    token = model.prefill(prompt, cache, table)
    steps = []
    for position in range(len(prompt), len(prompt) + new_tokens):
        steps.append(model.forward(token, position, cache, table)[0])
        token = steps[-1].argmax(-1, keepdim=True)
    return torch.stack(steps)


def dense_logits(model, tokens):
    """The same transformer in float64, over all tokens at once and without a cache."""
    rms_norm, linear = functional.rms_norm, functional.linear
    heads, kv_heads, dim = transformer.HEADS, transformer.KV_HEADS, transformer.HEAD_DIM
    n = len(tokens)
    frequencies = 10_000.0 ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    turns = torch.polar(
        torch.ones(n, dim // 2, dtype=torch.float64),
        torch.arange(n)[:, None] * frequencies,
    )[:, None]

    def rotate(x):
        half = dim // 2
        y = torch.complex(x[..., :half], x[..., half:]) * turns
        return torch.cat((y.real, y.imag), -1)

    x = model.embedding.double()[torch.tensor(tokens)]
    for layer in model.layers:
        y = linear(
            rms_norm(x, x.shape[-1:], eps=torch.finfo(torch.float32).eps), layer.qkv.double()
        )
        q, k, v = y.view(n, -1, dim).split((heads, kv_heads, kv_heads), 1)
        k, v = (t.repeat_interleave(heads // kv_heads, 1) for t in (rotate(k), v))
        y = functional.scaled_dot_product_attention(
            *(t.transpose(0, 1) for t in (rotate(q), k, v)), is_causal=True
        )
        x = x + linear(y.transpose(0, 1).reshape(n, -1), layer.out.double())
        y = rms_norm(x, x.shape[-1:], eps=torch.finfo(torch.float32).eps)
        gate, up = linear(y, layer.gate_up.double()).chunk(2, -1)
        x = x + linear(functional.silu(gate) * up, layer.down.double())
    y = rms_norm(x, x.shape[-1:], eps=torch.finfo(torch.float32).eps)
    return linear(y, model.head.double())


def test_paged_attention_gives_what_dense_attention_gives():
    model = make_model()
    generated = model.generate(PROMPT, 20)
    paged = logits_of(model, PROMPT, 20, model.new_cache(9), [7, 2, 8, 0, 5, 1])
    dense = dense_logits(model, list(PROMPT) + generated)[len(PROMPT) :]
    torch.testing.assert_close(paged, dense.float(), rtol=0, atol=2e-3)
    assert dense.std() > 0.5


@pytest.mark.parametrize("device", DEVICES)
def test_no_bit_depends_on_which_blocks_a_request_has_or_what_the_others_hold(device):
    model = make_model(device)
    alone = logits_of(model, PROMPT, 20, model.new_cache(6), [0, 1, 2, 3, 4, 5])
    crowded = model.new_cache(50)
    for kv_cache in crowded:
        kv_cache.uniform_(-9, 9)
    scattered = logits_of(model, PROMPT, 20, crowded, [31, 4, 49, 0, 17, 8])
    assert torch.equal(alone, scattered)


@pytest.mark.parametrize("device", DEVICES)
def test_decoding_requests_in_turn_changes_no_bit(device):
    model = make_model(device)
    prompts = [PROMPT, PROMPT[:16], PROMPT[5:38]]
    cache = model.new_cache(18)
    tables = [torch.arange(6 * i, 6 * i + 6, device=device) for i in range(3)]
    tokens = [[model.prefill(p, cache, t)] for p, t in zip(prompts, tables, strict=True)]
    for step in range(19):
        for prompt, table, seen in zip(prompts, tables, tokens, strict=True):
            seen.append(model.decode(seen[-1], len(prompt) + step, cache, table))
    for prompt, seen in zip(prompts, tokens, strict=True):
        assert torch.cat(seen).tolist() == model.generate(prompt, 20)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("lost", [0, 2])
def test_what_is_generated_depends_on_every_block_of_the_prompt(seed, lost):
    model = make_model(seed=seed)
    blocks = [0, 1, 2, 3, 4, 5]
    cache, table = model.new_cache(6), torch.tensor(blocks)
    token, tokens = model.prefill(PROMPT, cache, table), []
    for kv_cache in cache:
        kv_cache[:, lost] = 0
    for position in range(len(PROMPT), len(PROMPT) + 30):
        token = model.decode(token, position, cache, table)
        tokens.append(int(token))
    expected = model.generate(PROMPT, 31)[1:]
    assert sum(a != b for a, b in zip(tokens, expected, strict=True)) > 15


def test_weights_follow_the_seed():
    assert make_model(seed=3).generate(PROMPT, 9) == make_model(seed=3).generate(PROMPT, 9)
    assert make_model(seed=3).generate(PROMPT, 9) != make_model(seed=4).generate(PROMPT, 9)


def test_the_settings_that_fix_the_bits_are_put_back():
    torch.set_num_threads(2)
    torch.set_float32_matmul_precision("high")
    try:
        with same_bits_every_time():
            assert torch.get_num_threads() == 1
            assert torch.get_float32_matmul_precision() == "highest"
        assert torch.get_num_threads() == 2
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")
