"""Host pools as options of HostPool do not make them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

from torch_kvswap.host_pool import pinning
from torch_kvswap.host_pool.memory import map_new
from torch_kvswap.host_pool.pool import HostPool
from torch_kvswap.layout import PagedLayout


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
