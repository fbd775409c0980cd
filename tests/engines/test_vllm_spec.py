"""vLLM agrees with our spec about the configuration."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from patience import PATIENCE
from vllm_engine import (
    KVSwapOffloadingSpec,
    base,
    caches,
    config,
    keys,
)

from torch_kvswap.host_pool import system
from torch_kvswap.integrations.vllm.connector import MetricsSpec


@pytest.mark.parametrize(
    ("world", "chunk", "nbytes", "pages"),
    [(1, 1, 5999, 5), (4, 1, 8000, 2), (2, 3, 18000, 3), (1, 1, 5500.0, 5), (2, 4, 8000, 1)],
)
def test_bytes_of_all_workers_give_pages(world, chunk, nbytes, pages):
    spec = KVSwapOffloadingSpec(config(world, chunk, cpu_bytes_to_use=nbytes))
    assert spec.num_pages == pages


def config_of_stage(stage: int, layers: int, nbytes: int) -> Any:
    """Of a pipeline of two stages. A chunk has two blocks of 64 bytes in each layer."""
    settings = config(2, 2, layers * 64, stage, cpu_bytes_to_use=nbytes)
    return replace(settings, parallel=replace(settings.parallel, pp_size=2, tp_size=1))


# A process of two, with its rank and a store as arguments.
BEGIN = """
import sys
import torch
from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from test_vllm_spec import *
from vllm_contract import bytes_of, submit
from vllm_engine import CPULoadStoreSpec, bf16_cache

rank = int(sys.argv[1])

def begin(*sizes):
    with set_current_vllm_config(VllmConfig(device_config=DeviceConfig(device="cpu"))):
        parallel_state.init_distributed_environment(2, rank, sys.argv[2], rank, "gloo")
        parallel_state.initialize_model_parallel(*sizes, backend="gloo")
"""
# gloo ends a process that exits with its threads still there.
END = """
parallel_state.destroy_model_parallel()
parallel_state.destroy_distributed_environment()
"""
STAGE = """
    begin(1, 2)
    for layers, nbytes in (((2, 3), 1536), ((2, 1), 1536), ((2, 3), 767), ((2, 1), 511)):
        spec = KVSwapOffloadingSpec(config_of_stage(rank, layers[rank], nbytes))
        canonical = caches([[(0, layers[rank] * 64)]], [layers[rank] * 64], "cpu")
        try:
            worker = spec.get_worker(canonical)
        except ValueError as error:
            print("said", error)
        else:
            print("said", worker._pool.num_pages)
            worker.shutdown()
"""


def said_by_two(script: str, tmp_path: Path) -> list[list[str]]:
    """What two processes print behind "said ". They run at once."""

    def run(rank: int) -> list[str]:
        # Not run_script(), which runs one script after the other: these wait for each other.
        done = subprocess.run(
            [
                *(sys.executable, "-c", f"{BEGIN}{textwrap.dedent(script)}{END}"),
                *(str(rank), f"file://{tmp_path}/store"),
            ],
            cwd=Path(__file__).parent,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            timeout=3 * PATIENCE,
        )
        assert done.returncode == 0, done.stderr
        return [line[5:] for line in done.stdout.splitlines() if line.startswith("said")]

    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(run, range(2)))


def test_pipeline_stages_have_the_schedulers_pages(tmp_path):
    """vLLM gives the scheduler the configuration of the first worker."""
    said = said_by_two(STAGE, tmp_path)
    too_few = (
        "cpu_bytes_to_use is 511, but one chunk of 2 blocks takes 512 bytes in all workers together"
    )
    assert said[0] == ["3", "3", "1", too_few]
    assert said[1] == said[0]


def test_a_worker_without_layers_says_so():
    with pytest.raises(ValueError, match="no layer of this worker has a KV cache to offload"):
        KVSwapOffloadingSpec(config(cpu_bytes_to_use=5000)).get_worker(caches([[]], [64], "cpu"))


MLA_BYTES = 61 * 64 * 576 * 2  # a block of 64 tokens in 61 layers


@pytest.mark.parametrize(("replicated", "pages"), [(True, 15279), (False, 1909)])
def test_what_all_workers_have_is_kept_once(replicated, pages):
    """As many chunks as vLLM's own spec has, which takes a whole page of memory for each."""
    settings = config(8, 1, MLA_BYTES, replicated=replicated, cpu_bytes_to_use=64 << 30)
    spec = KVSwapOffloadingSpec(settings)
    assert (spec.num_pages, spec.replicated_layout) == (pages, replicated)
    assert (64 << 30) // (-(-MLA_BYTES // 4096) * 4096 * (1 if replicated else 8)) == pages


WORKER = """
    begin(2, 1)
    settings = config(2, 1, 4096, rank=rank, replicated=True, cpu_bytes_to_use=10 * 4096)
    cache, expected = bf16_cache(rank), bf16_cache(0)
    worker = KVSwapOffloadingSpec(settings).get_worker(cache)
    if rank == 0:
        submit(worker, 1, "store", [3, 4], CPULoadStoreSpec([7, 8]))
        worker.wait({1})
    torch.distributed.barrier(parallel_state.get_tp_group().cpu_group)
    submit(worker, 2, "load", [5, 6], CPULoadStoreSpec([7, 8]))
    worker.wait({2})
    for block in (3, 4):
        print("said", bytes_of(cache, block + 2) == bytes_of(expected, block))
    worker.shutdown()
"""


def test_equal_caches_load_what_rank_0_stored(tmp_path):
    assert said_by_two(WORKER, tmp_path) == [["True", "True"]] * 2


def test_too_few_bytes_for_a_chunk_are_refused():
    said = "^cpu_bytes_to_use is {}, but one chunk of {} blocks takes {} bytes in all workers together$"
    with pytest.raises(ValueError, match=said.format(7999, 4, 8000)):
        KVSwapOffloadingSpec(config(2, 4, cpu_bytes_to_use=7999)).get_manager()


def test_too_little_memory_names_the_option(tmp_path, monkeypatch):
    monkeypatch.setattr(system, "ROOT", tmp_path)
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemAvailable: 10 kB\n")
    spec = KVSwapOffloadingSpec(config(1, 1, 1000, cpu_bytes_to_use=20_000))
    said = "cpu_bytes_to_use is 20000, but the pages need 20000 bytes .*; set it to 10000 or less, or end"
    with pytest.raises(ValueError, match=said):
        spec.get_worker(caches([[(0, 1000)]], [1000], "cpu"))


def test_our_log_looks_like_vllms():
    script = """
    import logging
    from torch_kvswap.integrations.vllm.vllm_logging import write_where_vllm_does
    from vllm.config.logging import LoggingConfig
    from vllm.logger import configure_logging

    configure_logging(LoggingConfig())  # as each of vLLM's processes begins
    write_where_vllm_does()
    logging.getLogger("torch_kvswap.host_pool").info("it moves")
    logging.getLogger("torch_kvswap").warning("it is damaged")
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    environment |= {"VLLM_LOGGING_LEVEL": "INFO", "VLLM_LOGGING_STREAM": "ext://sys.stdout"}
    here = Path(__file__).parent
    command = [sys.executable, "-c", textwrap.dedent(script)]
    said = subprocess.check_output(command, cwd=here, env=environment, text=True)
    for level, text in (("INFO", "it moves"), ("WARNING", "it is damaged")):
        assert re.search(rf"pid=\d+\) {level} \S+ \d\d:\d\d:\d\d \[.*\] {text}\n", said)


def test_encoded_pages_are_more_in_the_same_memory():
    options = {"encoding": "lossless", "cpu_bytes_to_use": 10 << 20}
    spec = KVSwapOffloadingSpec(config(1, 1, 1 << 20, **options))
    assert spec.num_pages == 13
    worker = spec.get_worker(caches([[(0, 1 << 20)]], [1 << 20], "cpu", blocks=2))
    assert 10 * (1 << 20) - worker._pool.page_bytes < worker._pool.nbytes <= 10 * (1 << 20)
    worker.shutdown()


@pytest.mark.parametrize(
    ("dtype", "block"), [("float16", 1 << 20), ("fp8_e4m3", 1 << 20), ("float32", 64)]
)
def test_a_type_without_encoding_is_refused(dtype, block):
    settings = config(1, 1, block, encoding="lossless", cpu_bytes_to_use=10 << 20)
    settings = replace(settings, model=replace(settings.model, dtype=dtype))
    with pytest.raises(ValueError, match=f"for bfloat16, but the KV cache is of {dtype}; leave"):
        KVSwapOffloadingSpec(settings)


def test_workers_that_share_pages_cannot_encode_them():
    options = {"encoding": "lossless", "cpu_bytes_to_use": 10 << 20}
    with pytest.raises(ValueError, match="the 8 workers have the same cache and share raw pages"):
        KVSwapOffloadingSpec(config(8, 1, 1 << 20, replicated=True, **options))


@pytest.mark.parametrize("windows", [(3,), (None, 1), (4, None), (1, 2)])
def test_chunks_stored_in_part_are_refused(windows):
    with pytest.raises(ValueError, match="chunks of 2 blocks, but this model has sliding windows"):
        KVSwapOffloadingSpec(config(1, 2, windows=windows, cpu_bytes_to_use=5000))
    for chunk, others in ((1, windows), (2, (None, None))):
        spec = KVSwapOffloadingSpec(config(1, chunk, windows=others, cpu_bytes_to_use=5000))
        assert spec.num_pages == 5 // chunk


def test_a_model_without_a_cache_is_refused():
    with pytest.raises(ValueError, match="no KV cache to offload"):
        KVSwapOffloadingSpec(config(block_bytes=0, cpu_bytes_to_use=1)).get_manager()


@pytest.mark.parametrize("threshold", [0, 2])
def test_every_metric_of_the_manager_is_defined(threshold):
    extra = {"store_threshold": threshold, "cpu_bytes_to_use": 5000}
    manager = KVSwapOffloadingSpec(config(**extra)).get_manager()
    assert manager.prepare_store(keys(1, 2), base.ReqContext("r")) is not None
    said: dict[str, Any] = manager.get_stats().reduce()
    defined = MetricsSpec.build_metric_definitions(extra)
    assert said
    assert not [name for name in said if not any(name.startswith(each) for each in defined)]


def test_sizes_are_reported_as_vllm_does():
    from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

    # Chunks of whole pages of memory, which the spec of vLLM rounds up to.
    settings = config(2, 2, 4096, windows=(None, None), cpu_bytes_to_use=99_999)
    settings = replace(settings, model=replace(settings.model, max_model_len=320))
    ours, theirs = KVSwapOffloadingSpec(settings), CPUOffloadingSpec(settings)
    said = ours.get_manager().config_info()
    assert said == theirs.get_manager().config_info()
    assert said[0]["cpu_kv_cache_size_bytes"] == 6 * 2 * 2 * 4096
    assert MetricsSpec.config_info_keys({}) == theirs.config_info_keys({}) == tuple(said[0])
