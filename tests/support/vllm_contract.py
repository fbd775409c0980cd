"""The parts of vLLM that our manager and worker use: vLLM itself under `make test-vllm`, else
stand-ins with the same contract.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
import types
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

import numpy as np
import torch
from patience import PATIENCE

IS_REAL = bool(os.environ.get("KVSWAP_TEST_VLLM"))
_OURS = "torch_kvswap.integrations.vllm."


class LookupResult(Enum):
    MISS = auto()
    HIT = auto()
    HIT_PENDING = auto()


class Medium(Enum):
    CPU = "CPU"


@dataclass
class ReqContext:
    req_id: str
    positions: dict[bytes, int] = field(default_factory=dict)
    states: dict[type, Any] = field(default_factory=dict)

    def set_state(self, state: Any) -> None:
        self.states[type(state)] = state

    def get_state(self, kind: type) -> Any:
        return self.states.get(kind)

    def set_offload_key_position(self, key: bytes, end_token: int) -> None:
        self.positions[key] = end_token

    def get_offload_key_position(self, key: bytes) -> int | None:
        return self.positions.get(key)


@dataclass
class PrepareStoreOutput:
    keys_to_store: list[bytes]
    store_spec: Any
    evicted_keys: list[bytes]


@dataclass
class OffloadingEvent:
    keys: list[bytes]
    medium: Medium
    removed: bool
    metadata_only: bool = False


@dataclass
class TransferResult:
    job_id: int
    success: bool
    transfer_size: int
    transfer_time: float


@dataclass
class CanonicalKVCacheTensor:
    tensor: torch.Tensor
    page_size_bytes: int


@dataclass
class CanonicalKVCacheRef:
    tensor_idx: int
    page_size_bytes: int


@dataclass
class CanonicalKVCaches:
    tensors: list[CanonicalKVCacheTensor]
    group_data_refs: list[list[CanonicalKVCacheRef]]


class BlockIDs:
    def __init__(self, block_ids: list[int]) -> None:
        self.block_ids = np.array(block_ids, np.int32)


class GPULoadStoreSpec(BlockIDs):
    def __init__(
        self, block_ids: list[int], group_sizes: list[int], block_indices: list[int]
    ) -> None:
        super().__init__(block_ids)
        self.group_sizes, self.block_indices = group_sizes, block_indices


def _contract() -> dict[str, types.ModuleType]:
    def module(name: str, **names: Any) -> types.ModuleType:
        made = types.ModuleType(name)
        vars(made).update(names)
        return made

    plain = ("OffloadingManager", "OffloadingWorker", "RequestOffloadingContext", "LoadStoreSpec")
    base = {name: type(name, (), {}) for name in plain}
    for one in (LookupResult, Medium, ReqContext, PrepareStoreOutput, OffloadingEvent):
        base[one.__name__] = one
    for one in (CanonicalKVCacheTensor, CanonicalKVCacheRef, CanonicalKVCaches):
        base[one.__name__] = one
    base |= {"TransferResult": TransferResult, "GPULoadStoreSpec": GPULoadStoreSpec}
    connector = "vllm.distributed.kv_transfer.kv_connector.v1.offloading"
    modules = {
        "vllm.v1.kv_offload.base": base,
        "vllm.v1.kv_offload.cpu.common": {
            "CPULoadStoreSpec": BlockIDs,
            "CPUOffloadingMetrics": types.SimpleNamespace(),
        },
        f"{connector}.metrics": {"OffloadingConnectorStats": object},
        "vllm.v1.metrics.cache_hit_source": {"CacheHitSource": object},
    }
    made = {name: module(name, **names) for name, names in modules.items()}
    for name in list(made):
        parents = name.split(".")
        for depth in range(1, len(parents)):
            parent = ".".join(parents[:depth])
            made.setdefault(parent, module(parent, __path__=[]))
    for name, one in made.items():
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(made[parent], last, one)
    return made


def _load(*names: str) -> list[Any]:
    """Modules of our integration. On the contract they are nobody else's: vLLM seems not to be
    there afterwards, as before."""
    if IS_REAL:
        with warnings.catch_warnings():  # vLLM's own are not ours to mend
            warnings.simplefilter("ignore")
            return [importlib.import_module(name) for name in names]
    contract = _contract()
    sys.modules.update(contract)
    try:
        return [importlib.import_module(name) for name in names]
    finally:
        for name in (*contract, *names):
            sys.modules.pop(name, None)


base, common, manager_module, worker_module = _load(
    "vllm.v1.kv_offload.base",
    "vllm.v1.kv_offload.cpu.common",
    _OURS + "scheduler_side",
    _OURS + "worker",
)
KVSwapManager, KVSwapWorker = manager_module.KVSwapManager, worker_module.KVSwapWorker


def caches(
    groups: Sequence[Sequence[tuple[int, int]]], rows: Sequence[int], device: str, blocks: int = 24
) -> Any:
    """Random bytes. groups: (tensor, bytes used of its rows) of each layer. rows: bytes of a row of
    each tensor."""
    generator = torch.Generator().manual_seed(0)
    tensors = [
        torch.randint(-128, 128, (blocks, row), dtype=torch.int8, generator=generator).to(device)
        for row in rows
    ]
    return base.CanonicalKVCaches(
        tensors=[
            base.CanonicalKVCacheTensor(tensor, row)
            for tensor, row in zip(tensors, rows, strict=True)
        ],
        group_data_refs=[
            [base.CanonicalKVCacheRef(tensor, used) for tensor, used in layers] for layers in groups
        ],
    )


def names(groups: Sequence[Sequence[Any]]) -> list[list[str]]:
    """A name for each layer."""
    return [[f"{group}.{at}" for at in range(len(of))] for group, of in enumerate(groups)]


def submit(
    worker: Any, number: int, direction: str, blocks: list[int], spec: Any, first: int = 0
) -> None:
    """Starts a transfer of one group. first: the place of the first block in its request."""
    gpu = base.GPULoadStoreSpec(blocks, [len(blocks)], [first])
    pair = (gpu, spec) if direction == "store" else (spec, gpu)
    assert getattr(worker, f"submit_{direction}")(number, *pair)


def bytes_of(cache: Any, block: int) -> bytes:
    return b"".join(one.tensor[block].cpu().numpy().tobytes() for one in cache.tensors)


class TwoWorkers:
    """vLLM's group of two workers, which are threads."""

    def __init__(self) -> None:
        self._rank, self._said = threading.local(), Future[Any]()
        self.barrier = threading.Barrier(2, timeout=PATIENCE).wait

    @property
    def rank_in_group(self) -> int:
        return int(self._rank.number)

    def broadcast_object(self, mine: Any = None, src: int = 0) -> Any:
        if self.rank_in_group == src:
            self._said.set_result(mine)
        return self._said.result(PATIENCE)

    def run(self, body: Callable[[int], Any]) -> list[Callable[[], Any]]:
        """Runs the body of each rank. Returns what has their results."""

        def begin(rank: int) -> Any:
            self._rank.number = rank
            return body(rank)

        with ThreadPoolExecutor(2) as threads:
            return [threads.submit(begin, rank).result for rank in range(2)]
