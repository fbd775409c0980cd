"""One host pool for all workers of an engine whose caches are the same, byte by byte."""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import struct
import time
from typing import NamedTuple

from torch_kvswap.host_pool.pool import HostPool
from torch_kvswap.host_pool.shared import PoolHandle
from torch_kvswap.layout import PagedLayout

_CREDENTIALS = struct.Struct("3i")  # process, user, group
_POLL_SECONDS = 0.02


class Replicas(NamedTuple):
    """Which of the workers this is, of how many, and the engine's name, which no other has."""

    rank: int
    world: int
    engine_id: str


def replicated_pool(
    layout: PagedLayout,
    num_pages: int,
    blocks_per_page: int,
    replicas: Replicas,
    timeout: float = 300,
) -> HostPool:
    """Makes the pool in the worker of rank 0, and attaches to it in the others.

    All workers call it at about the same time. They meet at a Unix socket that is named after the
    engine, in the network namespace that they share; only processes of the same user are served.

    Args:
        layout, num_pages, blocks_per_page: as of HostPool, the same in all workers.
        replicas: this worker.
        timeout: seconds that one worker waits for another one to come. Pinning takes no part in it.

    Raises:
        TimeoutError: a worker has not come.
        RuntimeError: rank 0 has failed, or an engine of this name has a pool already.
    """
    address = _address(replicas.engine_id)
    deadline = time.monotonic() + timeout
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as meeting:
        if replicas.rank == 0:
            return _serve(meeting, address, layout, num_pages, blocks_per_page, replicas, timeout)
        _connect(meeting, address, replicas, deadline)
        try:
            handle = PoolHandle.receive(meeting)
        except ConnectionError as error:
            raise RuntimeError(
                f"worker {replicas.rank} got no host pool: worker 0 of engine "
                f"{replicas.engine_id!r} ended before it had made it; its log says why"
            ) from error
    try:
        return HostPool.attach(layout, handle, rank=replicas.rank)
    finally:
        handle.close()


def _address(engine_id: str) -> str:
    """In the abstract namespace: no file is left of it."""
    return f"\0torch_kvswap.{os.getuid()}.{hashlib.sha256(engine_id.encode()).hexdigest()}"


def _serve(
    meeting: socket.socket,
    address: str,
    layout: PagedLayout,
    num_pages: int,
    blocks_per_page: int,
    replicas: Replicas,
    timeout: float,
) -> HostPool:
    try:
        meeting.bind(address)
    except OSError as error:
        raise RuntimeError(
            f"an engine with the engine_id {replicas.engine_id!r} makes its host pool on this "
            "machine now; give each engine its own engine_id"
        ) from error
    meeting.listen(replicas.world)  # before the pool is made: the others wait in receive()
    pool = HostPool.create_shared(
        layout, num_pages, blocks_per_page, world=replicas.world, replicated=True
    )
    handle = pool.share()
    try:
        deadline = time.monotonic() + timeout
        for served in range(1, replicas.world):
            _serve_one(meeting, handle, served, replicas, deadline)
    except BaseException:
        pool.close()
        raise
    finally:
        handle.close()
    return pool


def _serve_one(
    meeting: socket.socket, handle: PoolHandle, served: int, replicas: Replicas, deadline: float
) -> None:
    while True:
        meeting.settimeout(max(deadline - time.monotonic(), 0.001))
        try:
            connection, _ = meeting.accept()
        except TimeoutError as error:
            raise TimeoutError(
                f"{served} of the {replicas.world} workers of engine {replicas.engine_id!r} have "
                "come for the host pool; the log of the others says why"
            ) from error
        # Of who hangs up nothing is known: a worker that has ended is missed in the end.
        with connection, contextlib.suppress(ConnectionError):
            if _user_of(connection) == os.getuid():
                handle.send(connection)
                return


def _connect(meeting: socket.socket, address: str, replicas: Replicas, deadline: float) -> None:
    while True:
        try:
            meeting.connect(address)
        except ConnectionRefusedError as error:  # worker 0 has not come yet
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"worker {replicas.rank} has found no worker 0 of engine "
                    f"{replicas.engine_id!r}; all of them have to run on one machine, and its log "
                    "says why it did not come"
                ) from error
            time.sleep(_POLL_SECONDS)
            continue
        if _user_of(meeting) != os.getuid():
            raise RuntimeError(
                f"a process of another user offers the host pool of engine {replicas.engine_id!r}"
            )
        return


def _user_of(connection: socket.socket) -> int:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(credentials)[1])
