"""An engine whose scheduler and worker are two processes, at a server (docs/serve.md).

The worker maps and pins the memory. The scheduler has the reservations, and never waits: it asks in
one step, and takes the answer in a later one.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import socket
import time
from array import array
from collections import deque
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

from torch_kvswap._native.arguments import Int64Array
from torch_kvswap.prefix import client
from torch_kvswap.prefix.client import RemoteManager, RemotePools, connect_to, numbers_at, receive
from torch_kvswap.prefix.hashing import DIGEST_BYTES
from torch_kvswap.prefix.manager import BlockStats
from torch_kvswap.prefix.protocol import (
    END,
    HELD,
    MET,
    NUMBER,
    PUBLISH,
    Op,
    Status,
    next_message,
    pack,
    pack_keys,
)

_READ_BYTES = 1 << 16
# Pages that a scheduler wants to have, if its largest recent step did not take more.
_LEAST_PAGES = 64


class WorkerSession(RemoteManager):
    """Keeps a server's memory mapped and pinned, for an engine whose scheduler asks the server.

    When the server is lost, the old memory stays until the scheduler has come to the next one: then
    no job uses it any more, and none will.

    Args:
        path (str): the server's socket.
        engine (str): the name of the engine, which its scheduler says too.
        cache, pools: see RemoteManager.
    """

    def __init__(
        self, path: str, engine: str, cache: dict[str, object], pools: RemotePools
    ) -> None:
        super().__init__(path, 1, cache, pools)
        self._engine = engine
        self._waiting: socket.socket | None = None  # for the scheduler

    def join(self) -> None:
        """See RemoteManager."""
        super().join()
        self._ask(Op.READY)

    def close(self) -> None:
        """See RemoteManager."""
        if not self._process.is_current:  # the connection is that of the parent
            return
        with self._lock:
            self._is_closing = True
            for connection in (self._waiting, self._connection):
                if connection is not None:  # wakes the thread
                    with contextlib.suppress(OSError):
                        connection.shutdown(socket.SHUT_RD)
            self._changed.notify_all()
        if self._thread.is_alive():  # it reads from what is closed next
            self._thread.join(client.DEADLINE)
        super().close()

    def _await_jobs(self, connection: socket.socket) -> None:
        if not self._generation:
            return
        with self._lock:
            if self._is_closing:
                raise ConnectionError("it is closed")
            self._waiting = connection
        try:
            said = {"engine": self._engine, "is_scheduler": False, "session": 0}
            connection.sendall(pack(Op.MEET, json.dumps(said).encode()))
            connection.settimeout(None)
            receive(connection)
            connection.settimeout(client.JOINING)
        finally:
            self._waiting = None

    def _until_lost(self) -> None:
        """Waits until the server has closed the connection: nothing else comes from it."""
        while (connection := self._connection) is not None:
            try:
                if connection.recv(1):
                    continue
                why = "it has closed the connection"
            except BlockingIOError:  # the time of a call is over
                continue
            except OSError as error:
                why = str(error)
            with self._lock:
                if self._connection is connection and not self._is_closing:
                    self._lose(why)
            return


class Held(NamedTuple):
    """What a server holds of a list of keys.

    Attributes:
        id (int): the reservation; 0 for none.
        pages (list[int]): of the keys that are held.
        indices (Sequence[int]): of these keys.
        in_front (int): so many keys in front are there, arrive, or are being asked for below; -1 if
            all are held.
    """

    id: int
    pages: list[int]
    indices: Sequence[int]
    in_front: int


@dataclass(eq=False, slots=True)
class _Lease:
    """Pages that are reserved before it is known for which keys.

    Attributes:
        id (int): the reservation.
        size (int): pages at first.
        free (list[tuple[int, int]]): position and number of the pages that no store has.
        in_use (int): pages of stores that have not ended.
        is_over (bool): no further store gets a page of it.
    """

    id: int
    size: int
    free: list[tuple[int, int]]
    in_use: int = 0
    is_over: bool = False


@dataclass(eq=False, slots=True)
class SplitStore:
    """A store, until its copy has ended.

    Attributes:
        number (int): names it.
        pages (np.ndarray): int64.
        places (list[tuple[_Lease, int, int]]): lease, position in it and number of each page.
    """

    number: int
    pages: Int64Array
    places: list[tuple[_Lease, int, int]]


@dataclass(eq=False, slots=True)
class SplitLoad:
    """A load, until its copy has ended.

    Attributes:
        number (int): names it.
        held (Sequence[Held]): with its pages.
    """

    number: int
    held: Sequence[Held]


class SchedulerSession(RemoteManager):
    """The block manager of a server for a scheduler that never waits for it.

    Calls send messages, and poll() takes the answers. It gives up a server that has closed the
    connection, or has neither answered nor taken anything for DEADLINE. A thread joins it again
    when all jobs have ended and the worker has pinned its memory.

    One thread makes all calls.

    Args:
        path (str): the server's socket.
        engine (str): the name of the engine, which its worker says too.

    Attributes:
        num_pages (int): of the server.
        losses (int): how many servers were lost.
        resets (int): how often this server was reset, by any engine.
    """

    def __init__(self, path: str, engine: str) -> None:
        super().__init__(path, 1, {}, RemotePools([], False, {}))
        self._engine = engine
        self.num_pages = self.losses = 0
        self._joining: socket.socket | None = None
        self._numbers = itertools.count(1)  # of jobs
        self._forget()

    def _forget(self) -> None:
        """Forgets what belongs to a server that is gone."""
        self._inbox, self._outbox = bytearray(), bytearray()
        self._failure, self._moved = "", 0.0  # moved: when the outbox was empty, or got shorter
        self._awaited: deque[tuple[float, Callable[[bytes], None]]] = deque()
        self._leases: list[_Lease] = []
        self._is_leasing = self._is_short = False  # is_short: the server gave less than asked for
        self._demand = self._taken = 0  # pages of one step, and of this one
        self.resets = 0  # the next server counts its own

    @property
    def is_joined(self) -> bool:
        """Whether there is a server, as far as poll() knows."""
        return self._connection is not None

    @property
    def is_asking(self) -> bool:
        """Whether answers have not come."""
        return bool(self._awaited)

    # Connecting.

    def join(self) -> None:
        """Waits for the worker, and connects. See RemoteManager.join()."""
        connection, generation = connect_to(self._path)
        try:
            with self._lock:
                if self._is_closing:
                    raise ConnectionError("it is closed")
                self._joining = connection
            session = self._session if generation == self._generation else 0
            said = {"engine": self._engine, "is_scheduler": True, "session": session}
            connection.sendall(pack(Op.MEET, json.dumps(said).encode()))
            if self._thread.is_alive():  # else the engine is being started, and its worker is there
                connection.settimeout(None)
            session, pages = MET.unpack(receive(connection))
            connection.setblocking(False)
        except BaseException:
            connection.close()
            raise
        finally:
            self._joining = None
        with self._lock:
            self._session, self._generation, self.num_pages = session, generation, pages
            if self._is_closing:
                connection.close()
            else:
                self._connection = connection

    def close(self) -> None:
        """Leaves the server. Its pages are the worker's until that one leaves. Idempotent."""
        if not self._process.is_current:  # the connection is that of the parent
            return
        with self._lock:
            self._is_closing = True
            if self._joining is not None:  # wakes the thread
                with contextlib.suppress(OSError):
                    self._joining.shutdown(socket.SHUT_RDWR)
        super().close()

    def poll(self) -> None:
        """Takes the answers that have come."""
        with self._lock:
            if self._connection is None:
                return
            self._receive()
            while not self._failure and (message := next_message(self._inbox)) is not None:
                status, body = message
                if status != Status.DONE:
                    self._failure = body.decode()
                    break
                self._awaited.popleft()[1](body)
            had_left = bool(self._outbox)
            self._flush()
            now = time.monotonic()
            if had_left and not self._outbox:  # only now has the server all of the questions
                self._awaited = deque((now, then) for _, then in self._awaited)
            late = self._awaited[0][0] if self._awaited else now
            if self._outbox:
                late = min(late, self._moved)
            if not self._failure and now - late > client.DEADLINE:
                self._failure = f"it did not answer within {client.DEADLINE:g} s"
            if self._failure:
                self._lose(self._failure)
                self._forget()
                self.losses += 1

    def _receive(self) -> None:
        assert self._connection is not None
        try:
            while data := self._connection.recv(_READ_BYTES):
                self._inbox += data
            self._failure = self._failure or "it has closed the connection"
        except BlockingIOError:
            pass
        except OSError as error:
            self._failure = str(error)

    def _flush(self) -> None:
        """Sends what the server takes."""
        try:
            while self._outbox and self._connection is not None:
                del self._outbox[: self._connection.send(self._outbox)]
                self._moved = time.monotonic()
        except BlockingIOError:
            pass
        except OSError as error:  # poll() says so: the step goes on with the pages that it has
            self._failure = str(error)

    def _send(self, message: bytes, then: Callable[[bytes], None] | None = None) -> None:
        """Sends a message, and calls `then` with its answer, in poll()."""
        with self._lock:
            if self._connection is None:
                return
            if not self._outbox:
                self._moved = time.monotonic()
            self._outbox += message
            if then is not None:
                self._awaited.append((time.monotonic(), then))
            self._flush()

    def _exchange(self, message: bytes, has_answer: bool = True) -> bytes | None:
        assert not has_answer, "a scheduler does not wait"
        self._send(message)
        return None

    # Requests.

    def hold(self, keys: Sequence[bytes], then: Callable[[list[Held]], None]) -> None:
        """Asks the server to hold the pages of those keys that are ready.

        Args:
            keys (Sequence[bytes]): lists of digests.
            then: gets what is held of each list. What is not loaded must be given to end_hold().
        """

        def answered(body: bytes) -> None:
            self._on_resets(body)
            then(_read_held(body))

        self._send(pack(Op.HOLD, NUMBER.pack(len(keys)), *pack_keys(keys)), answered)

    def end_hold(self, held: Sequence[Held]) -> None:
        """Ends what hold() has reserved."""
        for one in held:
            if one.id:
                self._send(pack(Op.END, END.pack(one.id, True)))

    def begin_load(self, held: Sequence[Held]) -> SplitLoad:
        """A load of pages that are held, which are so until end_load()."""
        load = SplitLoad(next(self._numbers), held)
        self._open.add(load.number)
        return load

    def end_load(self, load: SplitLoad, failed: Container[int] = ()) -> None:
        """The copy has ended. Nobody finds the blocks on failed pages any more."""
        for one in load.held:
            rejected = array("q", (at for at, page in enumerate(one.pages) if page in failed))
            if one.id:
                self._send(pack(Op.END, END.pack(one.id, True), rejected.tobytes()))
        self._end_job(load.number)

    def begin_store(self, count: int) -> SplitStore | None:
        """Pages for so many blocks of a store, or fewer if the server gives no more.

        Returns:
            SplitStore | None: None if a later step will have enough.
        """
        self._taken += count
        if not self.is_joined:
            return SplitStore(0, np.empty(0, np.int64), [])
        free = sum(len(lease.free) for lease in self._leases)
        if free < count and not (free and self._is_short):
            return None
        places: list[tuple[_Lease, int, int]] = []
        for lease in self._leases:
            taken = lease.free[: count - len(places)]
            del lease.free[: len(taken)]
            lease.in_use += len(taken)
            places += [(lease, *place) for place in taken]
        places.sort(key=lambda place: place[2])  # neighbours are copied together
        store = SplitStore(
            next(self._numbers), np.array([page for *_, page in places], np.int64), places
        )
        self._open.add(store.number)
        return store

    def end_store(self, store: SplitStore, keys: bytes, positions: Sequence[int]) -> None:
        """The copy has ended.

        Args:
            keys (bytes): digests of the blocks that were stored: others find them from now on.
            positions (Sequence[int]): of their pages in store.pages, ascending.
        """
        if self.is_joined:
            filled: dict[_Lease, list[tuple[int, bytes]]] = {}
            for number, at in enumerate(positions):
                lease, position, _ = store.places[at]
                digest = keys[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES]
                filled.setdefault(lease, []).append((position, digest))
            for lease, pages in filled.items():
                pages.sort()
                head = PUBLISH.pack(lease.id, len(pages))
                numbers = array("q", (position for position, _ in pages))
                digests = [digest for _, digest in pages]
                self._send(pack(Op.PUBLISH, head, numbers.tobytes(), *digests))
            is_filled = set(positions)
            for at, (lease, *place) in enumerate(store.places):
                lease.in_use -= 1
                if at not in is_filled and not lease.is_over:
                    lease.free.append((place[0], place[1]))
            for lease in {lease for lease, *_ in store.places}:
                self._end_lease(lease)
        self._end_job(store.number)

    def end_step(self) -> None:
        """Asks for pages for the stores of later steps, or gives some back."""
        self._demand = max(self._taken, self._demand - self._demand // 16)
        self._taken = 0
        if not self.is_joined or self._is_leasing:
            return
        wanted = max(self._demand, _LEAST_PAGES)
        free = sum(len(lease.free) for lease in self._leases)
        for lease in reversed(self._leases):
            is_too_many = free - lease.size >= wanted or free > 2 * wanted
            if is_too_many and len(lease.free) == lease.size:
                free -= lease.size
                self._give_up(lease)
        if free < self._demand or wanted - free >= wanted // 4:
            self._is_leasing = True
            missing = wanted - free
            self._send(pack(Op.LEASE, NUMBER.pack(missing)), partial(self._leased, missing))

    def reset(self) -> None:
        """Forgets all blocks, also those of other engines. Open stores must end without blocks."""
        self._give_up_all()
        self._send(pack(Op.RESET), self._on_resets)

    def ask_stats(self, then: Callable[[BlockStats], None]) -> None:
        """Asks for the statistics of the server, of all engines."""
        self._send(pack(Op.STATS, NUMBER.pack(0)), lambda body: then(BlockStats(*array("Q", body))))

    def _leased(self, asked: int, body: bytes) -> None:
        reservation = self._unpack(body)
        pages = [] if reservation is None else reservation.pages.tolist()
        self._is_leasing, self._is_short = False, len(pages) < asked
        if reservation is not None:
            self._leases.append(_Lease(reservation.id, len(pages), list(enumerate(pages))))

    def _on_resets(self, body: bytes) -> None:
        """An answer says how many resets there were. Of leases from before the last one the server
        publishes nothing."""
        (resets,) = NUMBER.unpack_from(body)
        if resets != self.resets:
            self.resets = resets
            self._give_up_all()

    def _give_up_all(self) -> None:
        for lease in list(self._leases):
            self._give_up(lease)

    def _give_up(self, lease: _Lease) -> None:
        lease.free, lease.is_over = [], True
        self._end_lease(lease)

    def _end_lease(self, lease: _Lease) -> None:
        """Ends a lease of which nothing is left here."""
        if not lease.free and not lease.in_use and lease in self._leases:
            self._leases.remove(lease)
            self._send(pack(Op.END, END.pack(lease.id, False)))

    def _end_job(self, number: int) -> None:
        with self._lock:
            self._open.discard(number)
            if self._connection is None and not self._open:
                self._changed.notify_all()


def _read_held(body: bytes) -> list[Held]:
    held, at = [], NUMBER.size
    while at < len(body):
        number, count, in_front = HELD.unpack_from(body, at)
        counts = [count] if in_front < 0 else [count, count]
        numbers = [of.tolist() for of in numbers_at(body, at + HELD.size, counts)]
        at += HELD.size + 8 * sum(counts)
        held.append(Held(number, numbers[0], [range(count), *numbers[1:]][-1], in_front))
    return held
