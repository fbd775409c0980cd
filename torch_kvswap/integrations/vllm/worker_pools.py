"""One host pool for all workers of an engine whose caches are equal."""

from __future__ import annotations

import contextlib
import os
from typing import Any

from torch_kvswap.host_pool.pool import HostPool
from torch_kvswap.host_pool.shared import PoolHandle
from torch_kvswap.layout import PagedLayout


def replicated_pool(
    layout: PagedLayout, num_pages: int, blocks_per_page: int, *, group: Any, **options: Any
) -> HostPool:
    """Makes the pool in the first worker, and attaches to it in the others.

    All workers call it. vLLM gives equal caches to the processes of one machine only. The others
    open the first one's memory in /proc, where the kernel lets processes of one user do so.

    Args:
        layout, num_pages, blocks_per_page, options: see HostPool; the same in all workers.
        group (GroupCoordinator): vLLM's group of the workers.
    """
    shape = num_pages, blocks_per_page
    if group.rank_in_group == 0:  # if it fails, vLLM ends the others
        pool = HostPool(layout, *shape, **options, shared=True)
        with contextlib.closing(pool.share()) as handle:
            path = f"/proc/{os.getpid()}/fd/{handle.fd}"
            group.broadcast_object((path, pool.page_bytes, handle.tensors))
            group.barrier()
        return pool
    path, page_bytes, tensors = group.broadcast_object()
    try:
        with (
            open(path, "r+b", buffering=0) as file,
            contextlib.closing(
                PoolHandle(file.fileno(), *shape, page_bytes, tensors, verify=options["verify"])
            ) as handle,
        ):
            return HostPool.attach(layout, handle, pin_in_background=options["pin_in_background"])
    finally:
        group.barrier()
