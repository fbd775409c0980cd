"""One host pool for all workers of an engine whose caches are equal."""

from __future__ import annotations

import contextlib
import socket
import uuid
from collections.abc import Callable
from typing import Any

from torch_kvswap.host_pool.pool import HostPool
from torch_kvswap.host_pool.shared import PoolHandle
from torch_kvswap.layout import PagedLayout

_TIMEOUT = 60.0


def replicated_pool(
    layout: PagedLayout,
    num_pages: int,
    blocks_per_page: int,
    *,
    rank: int,
    world: int,
    broadcast: Callable[[object], Any],
    pin_in_background: bool = False,
    **options: Any,
) -> HostPool:
    """Makes the pool in the worker of rank 0, and attaches to it in the others.

    All workers call it. vLLM gives equal caches to the processes of one machine only.

    Args:
        layout, num_pages, blocks_per_page, pin_in_background, options: see HostPool; the same in
            all workers.
        rank, world (int): this worker, and the number of workers.
        broadcast (Callable[[object], Any]): gives all workers what rank 0 passes.

    Raises:
        RuntimeError: rank 0 has failed.
        TimeoutError: a worker has ended.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as meeting:
        address = f"\0torch_kvswap.{uuid.uuid4()}"  # in the abstract namespace: no file remains
        if rank == 0:
            meeting.bind(address)
            meeting.listen()
        address = broadcast(address)
        if rank == 0:
            options |= {"pin_in_background": pin_in_background, "shared": True}
            pool = HostPool(layout, num_pages, blocks_per_page, **options)
            try:
                _share(pool, meeting, world - 1)
            except BaseException:
                pool.close()
                raise
            return pool
        meeting.connect(address)
        try:
            handle = PoolHandle.receive(meeting)
        except ConnectionError as error:
            raise RuntimeError(
                f"worker {rank} got no host pool, because worker 0 has failed; see its log"
            ) from error
        with contextlib.closing(handle):
            return HostPool.attach(layout, handle, pin_in_background=pin_in_background)


def _share(pool: HostPool, meeting: socket.socket, others: int) -> None:
    """Sends a handle of the pool to so many processes of this user, which have connected."""
    meeting.settimeout(_TIMEOUT)
    with contextlib.closing(pool.share()) as handle:
        while others:
            try:
                connection, _ = meeting.accept()
            except TimeoutError as error:
                raise TimeoutError(
                    f"{others} of the workers have not come for the host pool; see their logs"
                ) from error
            with connection, contextlib.suppress(PermissionError):
                handle.send(connection)
                others -= 1
