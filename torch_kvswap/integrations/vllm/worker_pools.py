"""One host pool for all workers of an engine: with equal caches, or with a part of each page."""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from torch_kvswap.host_pool.pool import HostPool
from torch_kvswap.host_pool.shared import PoolHandle
from torch_kvswap.layout import PagedLayout

_POLL_SECONDS = 0.02


class Replicas(NamedTuple):
    """A worker among those that share a pool.

    Attributes:
        rank (int): this worker, 0 to world - 1.
        world (int): number of workers.
        engine_id (str): name of the engine, unique on the machine.
        part (tuple[int, int] | None): what this worker has of each page: see HostPool. None if the
            caches of all workers are equal.
    """

    rank: int
    world: int
    engine_id: str
    part: tuple[int, int] | None = None


class Host(NamedTuple):
    """Where a worker runs. Workers share memory if all of this is equal.

    Attributes:
        name (str): name of the machine.
        boot (str): id of the machine's last boot; empty if it is not known.
        network (int): its network namespace, which has the Unix socket; 0 if it is not known.
    """

    name: str
    boot: str
    network: int


def this_host() -> Host:
    """The host of this process."""
    boot, network = "", 0
    with contextlib.suppress(OSError):  # some sandboxes do not tell
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    with contextlib.suppress(OSError):
        network = os.stat("/proc/self/ns/net").st_ino
    return Host(socket.gethostname(), boot, network)


def check_one_host(hosts: Sequence[Host]) -> None:
    """Raises RuntimeError if the workers are on several machines or in several network namespaces,
    from where some would never attach to the pool.

    Args:
        hosts (Sequence[Host]): the host of each worker, by rank; the same in all workers, so that
            all of them raise.
    """
    for rank, host in enumerate(hosts):
        if host != hosts[0]:
            first, other = (
                f"{name} (network namespace {net})" for name, _, net in (hosts[0], host)
            )
            raise RuntimeError(
                f"the {len(hosts)} workers share one host pool, but worker 0 "
                f"runs on {first} and worker {rank} on {other}; run all workers of an engine on "
                "one machine and in one container, or leave out kv_transfer_config"
            )


def replicated_pool(
    layout: PagedLayout,
    num_pages: int,
    blocks_per_page: int,
    replicas: Replicas,
    timeout: float = 300,
    pin_in_background: bool = False,
    **options: Any,
) -> HostPool:
    """Makes the pool in the worker of rank 0, and attaches to it in the others.

    All workers must call it at about the same time. They meet at a Unix socket named after the
    engine, in the network namespace that they share. Only processes of the same user are served.

    Args:
        layout, num_pages, blocks_per_page, options: see HostPool; the same in all workers.
        replicas (Replicas): this worker.
        timeout (float): seconds to wait for another worker; the time to pin memory is not counted.
        pin_in_background (bool): see HostPool.

    Raises:
        TimeoutError: a worker has not come.
        PermissionError: another user's process offers the pool.
        RuntimeError: rank 0 failed, or an engine with this name already has a pool.
    """
    address = address_of(replicas.engine_id)
    deadline = time.monotonic() + timeout
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as meeting:
        if replicas.rank == 0:
            options |= {"pin_in_background": pin_in_background, "shared": True}
            if replicas.part is not None:
                options["part"] = replicas.part
            make = partial(HostPool, layout, num_pages, blocks_per_page, **options)
            return _serve(meeting, address, replicas, timeout, make)
        _connect(meeting, address, replicas, deadline)
        try:
            handle = PoolHandle.receive(meeting)
        except ConnectionError as error:
            raise RuntimeError(
                f"worker {replicas.rank} got no host pool: worker 0 of engine "
                f"{replicas.engine_id!r} ended before it had made the pool; see its log"
            ) from error
    try:
        rank = 0 if replicas.part is None else replicas.part[0]
        return HostPool.attach(layout, handle, pin_in_background=pin_in_background, rank=rank)
    finally:
        handle.close()


def address_of(engine_id: str) -> str:
    """The socket's address, in the abstract namespace, so that no file remains."""
    return f"\0torch_kvswap.{os.getuid()}.{hashlib.sha256(engine_id.encode()).hexdigest()}"


def _serve(
    meeting: socket.socket,
    address: str,
    replicas: Replicas,
    timeout: float,
    make: Callable[[], HostPool],
) -> HostPool:
    """Makes the pool and sends its handle to every other worker."""
    try:
        meeting.bind(address)
    except OSError as error:
        raise RuntimeError(
            f"another engine with engine_id {replicas.engine_id!r} is making its host pool on this "
            "machine; give each engine its own engine_id"
        ) from error
    meeting.listen(replicas.world)  # before the pool is made, so that the others wait in receive()
    pool = make()
    handle = pool.share()
    try:
        deadline = time.monotonic() + timeout
        for served in range(1, replicas.world):
            try:
                send_to_next(meeting, handle, deadline=deadline)
            except TimeoutError as error:
                raise TimeoutError(
                    f"only {served} of the {replicas.world} workers of engine "
                    f"{replicas.engine_id!r} have attached to the host pool; see the logs of the "
                    "others"
                ) from error
    except BaseException:
        pool.close()
        raise
    finally:
        handle.close()
    return pool


def send_to_next(listener: socket.socket, handle: PoolHandle, deadline: float) -> None:
    """Sends the handle to the next process of this user that connects.

    One that hangs up is not counted: it was no worker, or its engine ends. Raises TimeoutError
    after the deadline, as time.monotonic() says it.
    """
    while True:
        listener.settimeout(max(deadline - time.monotonic(), 0.001))
        connection, _ = listener.accept()
        with connection, contextlib.suppress(ConnectionError, PermissionError):
            handle.send(connection)
            return


def _connect(meeting: socket.socket, address: str, replicas: Replicas, deadline: float) -> None:
    """Connects to rank 0, which may not have come yet."""
    while True:
        try:
            return meeting.connect(address)
        except ConnectionRefusedError as error:  # worker 0 has not come yet
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"worker {replicas.rank} has found no worker 0 of engine "
                    f"{replicas.engine_id!r}; all workers must run on one machine; see the log of "
                    "worker 0"
                ) from error
            time.sleep(_POLL_SECONDS)
