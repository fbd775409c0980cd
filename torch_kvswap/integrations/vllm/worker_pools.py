"""One host pool for all workers of an engine whose caches are equal."""

from __future__ import annotations

import contextlib
import os
import socket
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch_kvswap.host_pool.pool import HostPool
from torch_kvswap.host_pool.shared import PoolHandle
from torch_kvswap.layout import PagedLayout

Exchange = Callable[[object], Sequence[Any]]  # gives all workers what each of them says, by rank
_TIMEOUT = 60.0


def this_host() -> str:
    """Where this process runs. Workers can share memory if it is the same: the machine, its last
    boot, and the network namespace, which has the Unix socket."""
    said = [socket.gethostname()]
    with contextlib.suppress(OSError):  # some sandboxes do not tell
        said.append("boot " + Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    with contextlib.suppress(OSError):
        said.append("network namespace " + os.readlink("/proc/self/ns/net"))
    return ", ".join(said)


def check_one_host(hosts: Sequence[str]) -> None:
    """Raises RuntimeError if the workers are on several hosts, from where some would never attach
    to the pool. All workers know the hosts of all, by rank, so that all of them raise."""
    for rank, host in enumerate(hosts):
        if host != hosts[0]:
            raise RuntimeError(
                f"the {len(hosts)} workers share one host pool, but worker 0 runs on {hosts[0]} "
                f"and worker {rank} on {host}; run all workers of an engine on one machine and in "
                "one container, or leave out kv_transfer_config"
            )


def replicated_pool(
    layout: PagedLayout,
    num_pages: int,
    blocks_per_page: int,
    *,
    rank: int,
    exchange: Exchange,
    pin_in_background: bool = False,
    **options: Any,
) -> HostPool:
    """Makes the pool in the worker of rank 0, and attaches to it in the others.

    All workers call it. They meet at a Unix socket in the network namespace that they share.

    Args:
        layout, num_pages, blocks_per_page, pin_in_background, options: see HostPool; the same in
            all workers.
        rank (int): this worker.
        exchange (Exchange): of the workers.

    Raises:
        RuntimeError: the workers are on several hosts, or rank 0 has failed.
        TimeoutError: a worker has ended.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as meeting:
        # In the abstract namespace, so that no file remains.
        address = f"\0torch_kvswap.{uuid.uuid4()}"
        if rank == 0:
            meeting.bind(address)
            meeting.listen()
        said = exchange((this_host(), address))
        check_one_host([host for host, _ in said])
        if rank == 0:
            options |= {"pin_in_background": pin_in_background, "shared": True}
            pool = HostPool(layout, num_pages, blocks_per_page, **options)
            try:
                _share(pool, meeting, len(said) - 1)
            except BaseException:
                pool.close()
                raise
            return pool
        meeting.connect(said[0][1])
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
