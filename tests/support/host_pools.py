"""Host pools as options of HostPool do not make them, and what many of their tests do with one."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

from torch_kvswap.host_pool import PoolHandle, pinning
from torch_kvswap.host_pool.memory import map_new
from torch_kvswap.host_pool.pool import HostPool
from torch_kvswap.layout import PagedLayout
from torch_kvswap.offload.handler import OffloadHandler

if TYPE_CHECKING:
    from simulated_driver import Driver


def unpinned(*shape: Any, make: Callable[..., HostPool] = HostPool, **options: Any) -> HostPool:
    """A pool whose pages are pageable, and none of the driver's business."""
    with mock.patch.object(HostPool, "_pin"):
        return make(*shape, **options)


def with_gaps(layout: PagedLayout, num_pages: int, blocks_per_page: int, gap: int) -> HostPool:
    """A pool on memory with so many bytes of somebody else behind each slot."""
    page_bytes = blocks_per_page * (layout.block_bytes + gap)
    memory = map_new(num_pages * page_bytes, page_bytes, shared=False).tensor
    return HostPool.over(memory, layout, blocks_per_page, page_bytes=page_bytes)


def in_chunks(
    chunk_bytes: int, *shape: Any, make: Callable[..., HostPool] = HostPool, **options: Any
) -> HostPool:
    """A pool that is registered so many bytes at a time."""
    with mock.patch.object(pinning, "CHUNK_BYTES", chunk_bytes):
        return make(*shape, **options)


def through_a_socket(handle: PoolHandle) -> PoolHandle:
    here, there = socket.socketpair()
    with here, there:
        handle.send(here)
        return PoolHandle.receive(there)


def registered(driver: Driver) -> list[int]:
    """The bytes of each registration since the log was read last."""
    lines = driver.log().splitlines()
    return [int(line.split()[1]) for line in lines if line.startswith("register ")]


def round_trip(layout: PagedLayout, pool: HostPool, **options: Any) -> None:
    """Blocks 0 to 7 come back as they were, from neighbouring pages."""
    kept, ids = [tensor[:8].clone() for tensor in layout.tensors], list(range(8))
    with OffloadHandler(layout, pool, **options) as handler:
        handler.store(gpu_block_ids=ids, page_ids=ids).synchronize()
        for tensor in layout.tensors:
            tensor.zero_()
        handler.load(page_ids=ids, gpu_block_ids=ids).synchronize()
    for tensor, before in zip(layout.tensors, kept, strict=True):
        assert torch.equal(tensor[:8], before)
