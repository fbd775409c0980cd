"""vLLM agrees with our spec about the configuration."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from vllm_contract import TwoWorkers, bytes_of, submit
from vllm_engine import (
    CPULoadStoreSpec,
    KVSwapOffloadingSpec,
    bf16_cache,
    caches,
    config,
)

from torch_kvswap.host_pool import system
from torch_kvswap.integrations.vllm import spec as spec_module
from torch_kvswap.integrations.vllm import vllm_logging


@pytest.mark.parametrize(
    ("world", "chunk", "nbytes", "pages"),
    [(1, 1, 5999, 5), (4, 1, 8000, 2), (2, 3, 18000, 3), (1, 1, 5500.0, 5), (2, 4, 8000, 1)],
)
def test_bytes_of_all_workers_give_pages(world, chunk, nbytes, pages):
    """What all workers have is kept once."""
    for replicated, copies in ((False, 1), (True, world)):
        settings = config(world, chunk, replicated=replicated, cpu_bytes_to_use=nbytes // copies)
        spec = KVSwapOffloadingSpec(settings)
        assert (spec.num_pages, spec.replicated_layout) == (pages, replicated)


def start_both(patch: pytest.MonkeyPatch, caches: Sequence[Any], **how: Any) -> list[Any]:
    """The results of making the workers of both ranks."""
    ranks = TwoWorkers()
    for group in ("get_tp_group", "get_pp_group"):
        patch.setattr(spec_module, group, lambda: ranks)

    def begin(rank: int) -> Any:
        block_bytes = sum(one.page_size_bytes for one in caches[rank].tensors)
        settings = config(2, block_bytes=block_bytes, rank=rank, **how)
        return KVSwapOffloadingSpec(settings).get_worker(caches[rank])

    return ranks.run(begin)


@pytest.mark.parametrize(
    ("layers", "nbytes", "pages"), [((2, 3), 1536, 3), ((2, 1), 1536, 3), ((2, 3), 767, 1)]
)
def test_pipeline_stages_have_the_schedulers_pages(monkeypatch, layers, nbytes, pages):
    """vLLM gives the scheduler the configuration of the first worker. A chunk has two blocks of 64
    bytes in each layer."""
    stages = [caches([[(0, 64 * count)]], [64 * count], "cpu") for count in layers]
    how = {"chunk": 2, "sizes": {"pp_size": 2, "tp_size": 1}, "cpu_bytes_to_use": nbytes}
    for result in start_both(monkeypatch, stages, **how):
        worker = result()
        assert worker._pool.num_pages == pages
        worker.shutdown()


def test_equal_caches_load_what_rank_0_stored(monkeypatch):
    """With the checksums of rank 0."""
    both = [bf16_cache(0), bf16_cache(1)]
    expected = bytes_of(both[0], 3)
    how = {"replicated": True, "verify": "load", "cpu_bytes_to_use": 10 * 4096}
    first, second = [result() for result in start_both(monkeypatch, both, **how)]
    submit(first, 1, "store", [3, 4], CPULoadStoreSpec([7, 8]))
    first.wait({1})
    first._pool.pages[8, 0, 9] ^= 1
    submit(second, 2, "load", [5, 6], CPULoadStoreSpec([7, 8]))
    second.wait({2})
    assert bytes_of(both[1], 5) == expected
    assert second.take_failures() == [(2, "load", "damaged", {6}, {8})]
    for worker in (first, second):
        worker.shutdown()


def test_equal_caches_exchange_loads_if_asked(monkeypatch):
    both = [bf16_cache(0), bf16_cache(1)]
    how = {"replicated": True, "exchange": True, "cpu_bytes_to_use": 10 * 4096}
    for rank, result in enumerate(start_both(monkeypatch, both, **how)):
        with pytest.raises(ValueError, match=rf"exchange is \({rank}, 2\), but .* on cpu"):
            result()


@pytest.mark.parametrize(
    ("how", "said"),
    [
        (
            {"world": 2, "chunk": 4, "cpu_bytes_to_use": 7999},
            "cpu_bytes_to_use is 7999, but one chunk of 4 blocks takes 8000 bytes in all workers",
        ),
        ({"block_bytes": 0, "cpu_bytes_to_use": 1}, "no KV cache to offload"),
    ],
)
def test_too_few_bytes_for_a_chunk_are_refused(how, said):
    spec = KVSwapOffloadingSpec(config(**how))
    for ask in (spec.get_manager, lambda: spec.get_worker(caches([[(0, 1000)]], [1000], "cpu"))):
        with pytest.raises(ValueError, match=said):
            ask()


def test_too_little_memory_names_the_option(tmp_path, monkeypatch):
    monkeypatch.setattr(system, "ROOT", tmp_path)
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemAvailable: 10 kB\n")
    spec = KVSwapOffloadingSpec(config(1, 1, 1000, cpu_bytes_to_use=20_000))
    said = "cpu_bytes_to_use is 20000, but the pages need 20000 bytes .*; set it to 10000 or less, or end"
    with pytest.raises(ValueError, match=said):
        spec.get_worker(caches([[(0, 1000)]], [1000], "cpu"))


def test_the_parts_of_all_ranks_must_have_room(tmp_path, monkeypatch):
    """Each is of 10000 bytes."""
    (tmp_path / "proc").mkdir()
    monkeypatch.setattr(system, "ROOT", tmp_path)

    def begin(rank: int, kilobytes: int, nodes: int = 1) -> None:
        def available(kilobytes: int) -> None:
            (tmp_path / "proc/meminfo").write_text(f"MemAvailable: {kilobytes} kB\n")

        available(kilobytes)
        # From the barrier on the others take their parts.
        group = SimpleNamespace(rank_in_group=rank, barrier=lambda: available(10))
        monkeypatch.setattr(spec_module, "get_tp_group", lambda: group)
        monkeypatch.setattr(spec_module, "get_node_count", lambda: nodes)
        spec = KVSwapOffloadingSpec(config(2, 1, 1000, rank, cpu_bytes_to_use=20_000))
        spec.get_worker(caches([[(0, 1000)]], [1000], "cpu")).shutdown()

    said = "cpu_bytes_to_use is 20000, but the pages need 20000 bytes .*; set it to 14000 or less"
    with pytest.raises(ValueError, match=said):
        begin(0, 15)
    begin(0, 20)
    begin(1, 10)
    begin(0, 10, nodes=2)


def test_our_log_is_written_where_vllms_is(monkeypatch):
    ours, theirs = logging.Logger("torch_kvswap"), logging.getLogger("vllm")
    ours.parent = logging.Logger("root")  # the program has no handlers
    monkeypatch.setattr(vllm_logging, "log", ours)
    monkeypatch.setattr(theirs, "handlers", [logging.NullHandler()])
    monkeypatch.setattr(theirs, "level", logging.WARNING)
    for _ in range(2):  # of two connectors
        vllm_logging.write_where_vllm_does()
    assert (ours.handlers, ours.level) == (theirs.handlers, theirs.level)
    assert not ours.propagate, "vLLM's logger does not, either"


def test_encoded_pages_are_more_in_the_same_memory():
    options = {"encoding": "lossless", "cpu_bytes_to_use": 10 << 20}
    spec = KVSwapOffloadingSpec(config(1, 1, 1 << 20, **options))
    assert spec.num_pages == 13
    worker = spec.get_worker(caches([[(0, 1 << 20)]], [1 << 20], "cpu", blocks=2))
    assert 10 * (1 << 20) - worker._pool.page_bytes < worker._pool.nbytes <= 10 * (1 << 20)
    worker.shutdown()


LOSSLESS, SERVER = {"encoding": "lossless"}, {"host_server": "/s", "cpu_bytes_to_use": None}


@pytest.mark.parametrize(
    ("how", "said"),
    [
        (LOSSLESS | {"dtype": "float16"}, "for bfloat16, but the KV cache is of float16; leave"),
        (
            LOSSLESS | {"world": 8, "replicated": True},
            "the 8 workers have the same cache and share raw pages",
        ),
        ({"exchange": True, "world": 2}, "exchange is true, but only .* latent attention"),
        (SERVER | {"sizes": {"pp_size": 2}}, "pipeline_parallel_size is 2, .* which must be 1"),
        (SERVER | {"sizes": {"pcp_size": 2}}, "context_parallel_size 2 .* which must be 1"),
        (SERVER | {"sizes": {"dcp_size": 2}}, "context_parallel_size 2, which must be 1"),
        ({"chunk": 2, "windows": (3,)}, "chunks of 2 blocks, but this model has sliding windows"),
        ({"chunk": 2, "windows": (None, 1)}, "chunks of 2 blocks, but this model has sliding"),
    ],
)
def test_what_does_not_fit_the_engine_is_refused(how, said):
    with pytest.raises(ValueError, match=said):
        KVSwapOffloadingSpec(config(**{"cpu_bytes_to_use": 5000, **how}))


def test_sizes_are_reported_as_vllm_does():
    from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

    # Chunks of whole pages of memory, which the spec of vLLM rounds up to.
    settings = config(2, 2, 4096, windows=(None, None), cpu_bytes_to_use=99_999)
    settings = replace(settings, model=replace(settings.model, max_model_len=320))
    ours, theirs = KVSwapOffloadingSpec(settings), CPUOffloadingSpec(settings)
    said = ours.get_manager().config_info()
    assert said == theirs.get_manager().config_info()
    assert said[0]["cpu_kv_cache_size_bytes"] == 6 * 2 * 2 * 4096
    assert (
        KVSwapOffloadingSpec.config_info_keys({}) == theirs.config_info_keys({}) == tuple(said[0])
    )
