"""generate() with a HostCache gives the tokens of a DynamicCache."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

from torch_kvswap.offload.handler import Job, OffloadHandler
from torch_kvswap.results import CorruptedPageError

transformers = pytest.importorskip("transformers", minversion="5.24")

from torch_kvswap.integrations.transformers import HostCache  # noqa: E402  needs transformers

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def late_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSWAP_LATE_CPU", "1")  # a missing wait gives other tokens


def model(kind: str = "full", dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 300,
        "hidden_size": 128,
        "intermediate_size": 128,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "pad_token_id": 0,
        "eos_token_id": None,
        "initializer_range": 0.2,  # otherwise all tokens are the same
    }
    if kind == "full":
        net = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    else:
        types = ["full_attention", "sliding_attention"] * 3
        windows = {
            "sliding_window": 50,
            "layer_types": types if kind == "full first" else types[::-1],
        }
        config = transformers.Qwen2Config(**sizes, use_sliding_window=True, **windows)
        net = transformers.Qwen2ForCausalLM(config)
    return net.eval().to(dtype)


def host_cache(net: Any, **options: Any) -> Any:
    return contextlib.closing(HostCache(net.config, max_tokens=400, **options))


def generate(net: Any, cache: Any = None, chunk: int | None = None, **options: Any) -> Any:
    if cache is None:
        cache = transformers.DynamicCache(config=net.config)
    inputs = torch.arange(1, 601).view(2, 300) * 7 % 299 + 1
    mask = torch.ones_like(inputs)
    inputs[0, :40] = mask[0, :40] = 0
    settings = {"max_new_tokens": 20, "do_sample": False, "attention_mask": mask, **options}
    return net.generate(inputs, cache=cache, prefill_chunk_size=chunk, **settings)


@torch.no_grad()
def logits(net: Any, cache: Any, tokens: int, batch: int = 2) -> torch.Tensor:
    inputs = torch.arange(batch * tokens).view(batch, tokens) * 11 % 299 + 1
    return net(inputs, cache=cache).logits


@pytest.mark.parametrize("chunk", [None, 128, 100])  # blocks have 64 tokens
@pytest.mark.parametrize("kind", ["full", "full first", "window first"])
def test_tokens_are_those_of_a_dynamic_cache(kind: str, chunk: int | None) -> None:
    net = model(kind)
    want = generate(net, chunk=chunk)
    with host_cache(net) as cache:
        with torch.inference_mode():
            assert torch.equal(generate(net, cache, chunk), want)
        cache.reset()
        assert torch.equal(generate(net, cache, chunk), want)


def test_blocks_that_do_not_fit_are_kept_raw(monkeypatch: pytest.MonkeyPatch) -> None:
    net = model(dtype=torch.bfloat16)
    with torch.no_grad():  # values of one layer with exponents that no code covers
        net.model.layers[2].self_attn.v_proj.weight *= 2.0 ** -torch.arange(64)[:, None]
    want = generate(net, chunk=128)
    with (
        host_cache(net, encoding="lossless", buffers=2) as cache,
        pytest.raises(MemoryError, match="more than 2 blocks do not fit into encoded pages"),
    ):
        generate(net, cache, 128)
    monkeypatch.setattr("torch_kvswap.integrations.transformers.host_cache.RAW_SHARE", 0.5)
    with host_cache(net, encoding="lossless", buffers=2) as cache:
        assert torch.equal(generate(net, cache, 128), want)
        assert len(cache._host.raw_pages) == 5  # the blocks of that layer


def test_as_a_control_tokens_differ_without_the_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    net = model()
    want = generate(net, chunk=128)
    with host_cache(net) as cache:
        for of, method in ((Job, "synchronize"), (OffloadHandler, "poll")):
            monkeypatch.setattr(of, method, lambda self: [])
        assert not torch.equal(generate(net, cache, 128), want)


def test_a_load_that_fails_ends_the_generation() -> None:
    net = model()
    with host_cache(net, verify="load") as cache:
        generate(net, cache, 128, max_new_tokens=2)
        [handler] = cache._host.handlers  # raw blocks always fit, so that no second one is needed
        handler.synchronize()
        handler.pools[0].pages[4].zero_()  # block 0 of layer 4
        with torch.no_grad(), pytest.raises(CorruptedPageError):
            net(torch.ones(2, 1, dtype=torch.int64), cache=cache)
        cache.reset()
        assert torch.equal(generate(net, cache, 128), generate(net, chunk=128))


@pytest.mark.parametrize(
    ("kind", "stop"), [("full", 0), ("window first", 0), ("window first", 2), ("full first", 5)]
)
def test_after_a_stopped_pass_a_cache_needs_reset(
    kind: str, stop: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = model(kind)
    with host_cache(net) as cache:
        logits(net, cache, 70)
        update = cache.layers[stop].update

        def stopping(*arguments: Any, **options: Any) -> None:
            update(*arguments, **options)
            raise KeyboardInterrupt

        with monkeypatch.context() as patched:
            patched.setattr(cache.layers[stop], "update", stopping)
            with pytest.raises(KeyboardInterrupt):
                logits(net, cache, 1)
        with pytest.raises(RuntimeError, match=r"layer 0 is not .*: a forward pass did not end"):
            logits(net, cache, 1)
        cache.reset()
        assert torch.equal(generate(net, cache, 128), generate(net, chunk=128))


REFUSED = {
    "tokens": (ValueError, "70 tokens and 400 new ones", lambda net, c: logits(net, c, 400)),
    "batch": (ValueError, "3 sequences, and .* of 2", lambda net, c: logits(net, c, 1, 3)),
    "crop": (NotImplementedError, "cut its tokens", lambda _, c: c.crop(-5)),
    "beams": (NotImplementedError, "beam search", lambda _, c: c.reorder_cache([1, 0])),
    "select": (NotImplementedError, "cannot reorder", lambda _, c: c.batch_select_indices([1, 0])),
    "repeat": (NotImplementedError, "cannot reorder", lambda _, c: c.batch_repeat_interleave(2)),
    "record": (NotImplementedError, "assisted", lambda _, c: c.activate_past_recording()),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_changes_no_layer(name: str) -> None:
    error, said, call = REFUSED[name]
    net = model("window first")
    want = transformers.DynamicCache(config=net.config)
    with host_cache(net) as cache:
        for filled in (want, cache):
            logits(net, filled, 70)
        with pytest.raises(error, match=said):
            call(net, cache)
        assert not any(map(cache.is_recording_past, range(6)))
        assert torch.equal(logits(net, cache, 80), logits(net, want, 80))


def test_a_second_turn_computes_new_tokens_only() -> None:
    net = model("window first")
    prompt = torch.arange(300).view(2, 150) % 299 + 1
    caches = (transformers.DynamicCache(config=net.config), HostCache(net.config, max_tokens=400))
    turns = []
    for cache in caches:
        first = net.generate(prompt, cache=cache, do_sample=False, max_new_tokens=5)
        longer = torch.cat([first, prompt[:, :20]], 1)
        settings = {"do_sample": False, "max_new_tokens": 5, "prefill_chunk_size": 64}
        turns.append(net.generate(longer, cache=cache, **settings))
        assert cache.get_seq_length() == 179
    assert torch.equal(*turns)


@pytest.mark.parametrize("weight", ["k_proj", "v_proj"])
def test_gradients_of_keys_and_values_are_refused(weight: str) -> None:
    net = model().requires_grad_(False)
    getattr(net.model.layers[2].self_attn, weight).weight.requires_grad_(True)
    with host_cache(net) as cache, pytest.raises(RuntimeError, match="has no gradients"):
        net(torch.ones(2, 300, dtype=torch.int64), cache=cache)


def test_a_closed_cache_is_refused() -> None:
    net = model()
    with host_cache(net) as cache:
        pass
    with pytest.raises(RuntimeError, match="HostCache is closed; make another"):
        logits(net, cache, 10)


def test_keys_and_values_of_other_sizes_are_refused() -> None:
    ranks = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8}
    sizes = {"v_head_dim": 16, "vocab_size": 300, "hidden_size": 64, "intermediate_size": 64}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4}
    config = transformers.DeepseekV2Config(**ranks, **sizes, first_k_dense_replace=2)
    net = transformers.DeepseekV2ForCausalLM(config)
    with host_cache(net) as cache, pytest.raises(NotImplementedError, match="layer 0 has keys of"):
        logits(net, cache, 10)


def test_models_that_are_not_supported_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = transformers.LlamaConfig(num_hidden_layers=2)
    for what in (None, transformers):
        with pytest.raises(TypeError, match=r"^config is .*; pass model\.config$"):
            HostCache(what, 10)
    states = transformers.LlamaConfig(num_hidden_layers=2, layer_types=["full_attention", "conv"])
    with pytest.raises(NotImplementedError, match="layer 1 has a LinearAttentionLayer"):
        HostCache(states, 10)
    with pytest.raises(NotImplementedError, match="the model has an encoder"):
        HostCache(transformers.BartConfig(), 10)
    monkeypatch.setattr(transformers, "__version__", "5.23.1")
    with pytest.raises(ImportError, match=r"transformers 5\.23\.1 may .* needs transformers 5\.24"):
        HostCache(config, 10)
