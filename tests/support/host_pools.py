"""Host pools as options of HostPool do not make them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

from torch_kvswap.host_pool import pinning
from torch_kvswap.host_pool.pool import HostPool


def unpinned(*shape: Any, **options: Any) -> HostPool:
    """A pool whose pages are pageable, and none of the driver's business."""
    with mock.patch.object(HostPool, "_pin"):
        return HostPool(*shape, **options)


def in_chunks(
    chunk_bytes: int, *shape: Any, make: Callable[..., HostPool] = HostPool, **options: Any
) -> HostPool:
    """A pool that is registered so many bytes at a time."""
    with mock.patch.object(pinning, "CHUNK_BYTES", chunk_bytes):
        return make(*shape, **options)
