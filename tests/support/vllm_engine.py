"""Configurations of the real vLLM, for tests that `make test-vllm` runs."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from typing import Any

import pytest

if not os.environ.get("KVSWAP_TEST_VLLM"):
    pytest.skip("`make test-vllm` runs these", allow_module_level=True)

with warnings.catch_warnings():  # vLLM's own are not ours to mend
    warnings.simplefilter("ignore")
    import vllm.v1.kv_offload.cpu.manager  # noqa: F401  tests compare with it
    from vllm.v1.kv_offload import base
    from vllm.v1.kv_offload import config as offload_config
    from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
    from vllm_contract import KVSwapManager, KVSwapWorker, caches

    from torch_kvswap.integrations.vllm import KVSwapOffloadingSpec

__all__ = [
    "CPULoadStoreSpec",
    "KVSwapManager",
    "KVSwapOffloadingSpec",
    "KVSwapWorker",
    "base",
    "caches",
]

SPEC = {
    "spec_name": "KVSwapOffloadingSpec",
    "spec_module_path": "torch_kvswap.integrations.vllm",
}


def key(number: int, group: int = 0) -> bytes:
    """As long as those of vLLM: a SHA-256 and a group."""
    return bytes(base.make_offload_key(number.to_bytes(32, "big"), group))


def keys(*numbers: int) -> list[bytes]:
    return [key(number) for number in numbers]


HAS_REPLICAS = "replicated_layout" in offload_config.OffloadingConfig.__dataclass_fields__  # 0.33


def config(
    world: int = 1,
    chunk: int = 1,
    block_bytes: int = 1000,
    rank: int = 0,
    replicated: bool = False,
    windows: Sequence[int | None] = (None,),
    **extra: Any,
) -> Any:
    """Of blocks with this many bytes in a worker. windows: of each group of layers, in chunks.
    extra: with canonical_layout, of a model for which vLLM certifies it."""
    group: dict[str, Any] = {"tokens_per_block": 16, "layer_names": ("a", "b")}
    parallel: dict[str, Any] = dict.fromkeys(("pp_size", "pcp_size", "dcp_size"), 1)
    parallel |= {"rank": rank, "world_size": world, "tp_size": world, "data_parallel_index": 0}
    is_canonical = bool(extra.get("canonical_layout"))
    parallel["is_parallelism_agnostic"] = is_canonical
    more: dict[str, Any] = {"replicated_layout": True} if replicated else {}
    if is_canonical and HAS_REPLICAS:
        more |= {"canonical_layout": True, "kv_cache_layout": "LBHNC"}
    groups = [group] * len(windows)
    if "group_id" in offload_config.OffloadingGroupConfig.__dataclass_fields__:  # 0.33
        groups = [
            group | {"group_id": number, "sliding_window_size_in_chunks": window}
            for number, window in enumerate(windows)
        ]
        parallel |= {"data_parallel_size": 1, "data_parallel_rank_local": None}
    return offload_config.OffloadingConfig(
        groups=tuple(offload_config.OffloadingGroupConfig(**group) for group in groups),
        worker_kv_bytes_per_block=block_bytes,
        enable_kv_cache_events=False,
        extra_config=SPEC | extra,
        engine_id="engine",
        model=offload_config.OffloadingModelConfig("model", "bfloat16"),
        cache=offload_config.OffloadingCacheConfig(16, chunk),
        parallel=offload_config.OffloadingParallelConfig(**parallel),
        **more,
    )
