"""Exchange: ranks that load the same pages, each a part of them over its own link."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Sequence

import torch

from torch_kvswap._native import rendezvous
from torch_kvswap._native.descriptors import Descriptors
from torch_kvswap._native.loader import native
from torch_kvswap.host_pool.memory import Mapping, Registration, create_file
from torch_kvswap.host_pool.pool import HostPool
from torch_kvswap.host_pool.shape import read_part

JOIN_TIMEOUT = 60.0  # seconds in which all ranks have to make their handlers
DEADLINE = 10.0  # seconds without any progress, after which a rank gives up a load
_PAUSE = 0.01


def read_exchange(
    exchange: object, device: torch.device, pools: Sequence[HostPool]
) -> tuple[int, int] | None:
    """Checks the argument `exchange` of a handler.

    Raises:
        TypeError: it is no tuple of two integers.
        ValueError: a number is out of range, or the device or a pool is not possible.
    """
    ranks = read_part(exchange, "exchange")
    if ranks is None:
        return None
    said = f"exchange is {exchange}"
    if not 2 <= ranks[1] <= native.MAX_EXCHANGE_RANKS:
        raise ValueError(f"{said}; 2 to {native.MAX_EXCHANGE_RANKS} ranks can exchange loads")
    if device.type != "cuda":
        raise ValueError(f"{said}, but the cache is on {device}, which has no link")
    for pool in pools:
        if _file_of(pool) is None:
            raise ValueError(
                f"{said}, but a host pool belongs to this process; all ranks must use the pages of "
                "one pool: make it with HostPool(shared=True), and attach() to it"
            )
        if pool.num_parts > 1:
            raise ValueError(
                f"{said}, but a host pool has parts, which no two ranks load; leave exchange out"
            )
    return ranks


class ExchangeMemory:
    """What ranks share for an exchange, pinned until close().

    Raises:
        TimeoutError: the other ranks have not come by the time `until`.
        OSError: they cannot meet.
        RuntimeError: the driver does not pin it.
    """

    def __init__(
        self, ranks: tuple[int, int], pools: Sequence[HostPool], device: torch.device, until: float
    ) -> None:
        with contextlib.closing(_shared_file(*ranks, pools, until)) as file:
            self._mapping = Mapping(native.EXCHANGE_BYTES, file.fd)
        self._registration = Registration(self._mapping, device)
        if reason := self._registration.add(0, native.EXCHANGE_BYTES):
            raise RuntimeError(reason)
        self.address = self._mapping.address

    def close(self) -> None:
        self._registration.remove()
        self._mapping.release()


def _shared_file(rank: int, ranks: int, pools: Sequence[HostPool], until: float) -> Descriptors:
    """A file in memory that rank 0 makes and sends to the others. They meet at a socket that is
    named after the pools' files."""
    files = [os.fstat(file).st_ino for pool in pools if (file := _file_of(pool)) is not None]
    name = "\0kvswap-exchange-" + "-".join(map(str, sorted(set(files))))
    if rank > 0:
        with socket.socket(socket.AF_UNIX) as connection:
            _connect(connection, name, until)
            came = rendezvous.receive(connection, 1)[1]
        if not came.fds or os.fstat(came.fd).st_size < native.EXCHANGE_BYTES:
            raise ConnectionError("rank 0 has not sent what this release of the library needs")
        return came
    with contextlib.ExitStack() as undo, socket.socket(socket.AF_UNIX) as listener:
        made = undo.enter_context(contextlib.closing(create_file(native.EXCHANGE_BYTES)))
        listener.bind(name)
        listener.listen()
        for _ in range(1, ranks):
            listener.settimeout(max(until - time.monotonic(), _PAUSE))
            with listener.accept()[0] as connection:
                rendezvous.check_peer(connection, "process {pid}, which joins the exchange,")
                rendezvous.send(connection, b"0", [made.fd])
        undo.pop_all()
    return made


def _connect(connection: socket.socket, name: str, until: float) -> None:
    while True:
        with contextlib.suppress(ConnectionRefusedError):
            connection.connect(name)
            connection.settimeout(max(until - time.monotonic(), _PAUSE))
            return rendezvous.check_peer(connection, "process {pid}, rank 0 of the exchange,")
        if time.monotonic() > until:
            raise TimeoutError
        time.sleep(_PAUSE)


def _file_of(pool: HostPool) -> int | None:
    return getattr(pool._memory.mapping, "fd", None)
