"""generate() with a HostCache gives the tokens of a DynamicCache."""

from __future__ import annotations

import contextlib
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from continuous_batching import needs_transformers

from torch_kvswap.offload.handler import Job, OffloadHandler
from torch_kvswap.results import CorruptedPageError

pytestmark = [needs_transformers, pytest.mark.slow]


@pytest.fixture(autouse=True)
def late_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSWAP_LATE_CPU", "1")  # a missing wait gives other tokens


def model(kind: str = "full", dtype: torch.dtype = torch.float32) -> Any:
    import transformers

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
        windows = {"sliding_window": 50, "layer_types": ["full_attention", "sliding_attention"] * 3}
        config = transformers.Qwen2Config(**sizes, use_sliding_window=True, **windows)
        net = transformers.Qwen2ForCausalLM(config)
    return net.eval().to(dtype)


def host_cache(net: Any, **options: Any) -> Any:
    from torch_kvswap.integrations.transformers import HostCache

    return contextlib.closing(HostCache(net.config, max_tokens=400, **options))


def generate(net: Any, cache: Any = None, chunk: int | None = None, **options: Any) -> Any:
    import transformers

    if cache is None:
        cache = transformers.DynamicCache(config=net.config)
    inputs = torch.arange(1, 601).view(2, 300) * 7 % 299 + 1
    mask = torch.ones_like(inputs)
    inputs[0, :40] = mask[0, :40] = 0
    settings = {"max_new_tokens": 20, "do_sample": False, "attention_mask": mask, **options}
    return net.generate(inputs, past_key_values=cache, prefill_chunk_size=chunk, **settings)


@pytest.mark.parametrize("chunk", [None, 128, 100])  # blocks have 64 tokens
@pytest.mark.parametrize("kind", ["full", "sliding"])
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
        host = cache._host
        host.handler.synchronize()
        host.handler.pools[0].pages[4].zero_()  # block 0 of layer 4
        with torch.no_grad(), pytest.raises(CorruptedPageError):
            net(torch.ones(2, 1, dtype=torch.int64), past_key_values=cache)
        cache.reset()
        assert torch.equal(generate(net, cache, 128), generate(net, chunk=128))


def test_after_a_failed_pass_a_cache_needs_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    net, token = model(), torch.ones(2, 1, dtype=torch.int64)
    with host_cache(net) as cache, torch.no_grad():
        generate(net, cache, 128, max_new_tokens=2)
        with monkeypatch.context() as patched:
            patched.setattr(OffloadHandler, "load", Mock(side_effect=MemoryError))
            with pytest.raises(MemoryError):  # in the first layer
                net(token, past_key_values=cache)
        with pytest.raises(RuntimeError, match="a forward pass did not end"):
            net(token, past_key_values=cache)
        cache.reset()
        assert torch.equal(generate(net, cache, 128), generate(net, chunk=128))


def test_what_a_host_cache_cannot_do_is_refused() -> None:
    import transformers

    net = model()
    with host_cache(net) as cache:
        with pytest.raises(RuntimeError, match="a HostCache has no gradients"):
            net(torch.ones(2, 300, dtype=torch.int64), past_key_values=cache)
        with torch.no_grad():
            net(torch.ones(2, 300, dtype=torch.int64), past_key_values=cache)
        with torch.no_grad(), pytest.raises(ValueError, match="300 tokens and 101 new ones are"):
            net(torch.ones(2, 101, dtype=torch.int64), past_key_values=cache)
        cache.reset()
        with pytest.raises(NotImplementedError, match="beam search"):
            generate(net, cache, num_beams=2)
        cache.reset()
        generate(net, cache, 128)
        if tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 24):
            with torch.no_grad(), pytest.raises(NotImplementedError, match="filled cache"):
                net(torch.ones(2, 10, dtype=torch.int64), past_key_values=cache)
    with torch.no_grad(), pytest.raises(RuntimeError, match="HostCache is closed; make another"):
        net(torch.ones(2, 10, dtype=torch.int64), past_key_values=cache)
    states = transformers.LlamaConfig(num_hidden_layers=2, layer_types=["full_attention", "conv"])
    for config in (None, net):
        with pytest.raises(TypeError, match=r"^config is .*; pass model\.config$"):
            host_cache(type("Net", (), {"config": config}))
    with pytest.raises(NotImplementedError, match="layer 1 has a LinearAttentionLayer"):
        host_cache(type("Net", (), {"config": states}))
