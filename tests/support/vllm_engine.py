"""Configurations of the real vLLM, for tests that `make test-vllm` runs."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

if not os.environ.get("KVSWAP_TEST_VLLM"):
    pytest.skip("`make test-vllm` runs these", allow_module_level=True)

with warnings.catch_warnings():  # vLLM's own are not ours to mend
    warnings.simplefilter("ignore")
    import vllm.v1.kv_offload.cpu.manager  # noqa: F401  tests compare with it
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
        OffloadingConnectorStats,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
        OffloadingConnectorScheduler,
    )
    from vllm.v1.kv_offload import base
    from vllm.v1.kv_offload import config as offload_config
    from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
    from vllm_contract import KVSwapManager, KVSwapWorker, caches

    from torch_kvswap.integrations.vllm.spec import KVSwapOffloadingSpec

__all__ = [
    "CPULoadStoreSpec",
    "KVConnectorFactory",
    "KVSwapManager",
    "KVSwapOffloadingSpec",
    "KVSwapWorker",
    "OffloadingConnectorScheduler",
    "OffloadingConnectorStats",
    "base",
    "caches",
]


def key(number: int, group: int = 0) -> bytes:
    """As long as those of vLLM: a SHA-256 and a group."""
    return bytes(base.make_offload_key(number.to_bytes(32, "big"), group))


def keys(*numbers: int) -> list[bytes]:
    return [key(number) for number in numbers]


def config(
    world: int = 1,
    chunk: int = 1,
    block_bytes: int = 1000,
    rank: int = 0,
    replicated: bool = False,
    windows: Sequence[int | None] = (None,),
    dtype: str = "bfloat16",
    sizes: Mapping[str, int] | None = None,
    **extra: Any,
) -> Any:
    """Of blocks with this many bytes in a worker. windows: of each group of layers, in chunks.
    sizes: of kinds of parallelism. extra: with canonical_layout, of a model for which vLLM
    certifies it."""
    group: dict[str, Any] = {"tokens_per_block": 16, "layer_names": ("a", "b")}
    parallel: dict[str, Any] = dict.fromkeys(("pp_size", "pcp_size", "dcp_size"), 1)
    parallel |= {"rank": rank, "world_size": world, "tp_size": world, "data_parallel_index": 0}
    parallel |= sizes or {}
    is_canonical = bool(extra.get("canonical_layout"))
    parallel["is_parallelism_agnostic"] = is_canonical
    more: dict[str, Any] = {"replicated_layout": True} if replicated else {}
    if is_canonical:
        more |= {"canonical_layout": True, "kv_cache_layout": "LBHNC"}
    groups = [
        group | {"group_id": number, "sliding_window_size_in_chunks": window}
        for number, window in enumerate(windows)
    ]
    parallel |= {"data_parallel_size": 1, "data_parallel_rank_local": None}
    return offload_config.OffloadingConfig(
        groups=tuple(offload_config.OffloadingGroupConfig(**group) for group in groups),
        worker_kv_bytes_per_block=block_bytes,
        enable_kv_cache_events=False,
        extra_config=extra,
        engine_id="engine",
        model=offload_config.OffloadingModelConfig("model", dtype),
        cache=offload_config.OffloadingCacheConfig(16, chunk),
        parallel=offload_config.OffloadingParallelConfig(**parallel),
        **more,
    )


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder, in a process whose engines name equal chunks alike."""
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    return tmp_path


def bf16_cache(seed: int = 0, blocks: int = 12, wide: Sequence[int] = ()) -> Any:
    """A cache of values. Those of `wide` blocks do not fit into encoded slots."""
    cache = caches([[(0, 2048), (1, 2048)]], [2048, 2048], "cpu", blocks)
    generator = torch.Generator().manual_seed(seed)
    for one in cache.tensors:
        values = (1 + torch.rand(blocks, 1024, generator=generator)).bfloat16()
        values[list(wide)] = torch.exp2(torch.arange(1024) % 60).bfloat16()
        one.tensor.copy_(values.view(torch.int8))
    return cache
