"""The block manager and the pools of a prefix cache that a server keeps (docs/serve.md)."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
import stat
import struct
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, count, pairwise
from typing import Any

import numpy as np

from torch_kvswap._native import rendezvous
from torch_kvswap._native.arguments import (
    Int64Array,
    NotCopyable,
    kind_of,
    read_int,
    read_switch,
)
from torch_kvswap._native.ids import split_groups
from torch_kvswap._native.loader import ForkGuard, native
from torch_kvswap._native.log import log
from torch_kvswap._native.process_lock import open_lock
from torch_kvswap.encoding.slot import EncodingName, VerifyName, read_encoding, read_verify
from torch_kvswap.host_pool.description import describe_page
from torch_kvswap.host_pool.pool import HostPool
from torch_kvswap.host_pool.shape import PoolShape
from torch_kvswap.host_pool.shared import PoolHandle
from torch_kvswap.layout import PagedLayout
from torch_kvswap.offload.groups import Groups
from torch_kvswap.offload.handler import OffloadHandler
from torch_kvswap.prefix.block_groups import (
    BlockGroup,
    describe_contents,
    read_groups,
    unit_tokens,
)
from torch_kvswap.prefix.hashing import KEY_BYTES, Keys
from torch_kvswap.prefix.manager import BlockStats, Lookup, needed_blocks
from torch_kvswap.prefix.protocol import (
    HEAD,
    JOINING,
    MAGIC,
    READ_BYTES,
    VERSION,
    Ask,
    Op,
    Status,
    next_message,
    pack,
    pack_keys,
)

# Seconds, read at each use so that tests can set them.
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0  # before a lost server is tried again

_NOTHING = Lookup(0, 0, 0)


class RemoteReservation(native.Reservation):
    """Pages that a server holds for this engine. end_reported() tells it of their end.

    Attributes:
        pages (list[np.ndarray]), key_indices (list[np.ndarray]): of each group; indices of a store.
        lease (RemoteReservation | None): of preempt().
        answers (list[int]): of hold(): the page of each key, or its KeyState.
    """

    key_indices: Any = ()
    pages: Any = ()
    lease: RemoteReservation | None = None
    answers: list[int]


class Session(NotCopyable):
    """A connection to a server, of an engine, or of its scheduler or one of its workers.

    Requests are sent, and their answers come later, in the same order. A server that does not
    answer within its deadline, or has closed the connection, is given up. A thread then tries to
    join it again, once no job uses its pages. A worker keeps the old memory until its scheduler has
    come to the next server: then no job uses it any more, and none will.

    Args:
        path (str): the server's socket.
        cache: what the server compares, from describe(); a scheduler has none.
        pools (RemotePools | None): get the server's memory; None for a scheduler, which maps none.
        groups (int | Sequence[BlockGroup]): as for a BlockManager.
        engine (str): the name of the engine, if its scheduler and workers have sessions of their
            own.
        worker (int): the number of this worker in its engine, from 0 on.
        workers (int): of a scheduler, how many workers its engine has; 0 for others.

    Attributes:
        groups, unit_tokens: see BlockManager.
        num_pages (int): pages of the server's first group.
        resets (int): grows with each reset of the index, by any engine, as far as the server has
            said so, and whenever a server is lost or joined.
    """

    def __init__(
        self,
        path: str,
        cache: dict[str, object],
        pools: RemotePools | None,
        groups: int | Sequence[BlockGroup] = 1,
        engine: str = "",
        worker: int = 0,
        workers: int = 0,
    ) -> None:
        self.groups = read_groups(groups)
        self.unit_tokens = unit_tokens(self.groups)
        self.num_pages = 0
        self._is_list = not isinstance(groups, int)
        self._path, self._cache, self._pools = path, cache, pools
        self._names = {"engine": engine, "worker": worker, "workers": workers}
        self._is_worker = bool(engine) and pools is not None
        self._process = ForkGuard()
        self._session = self._generation = 0  # 0: none
        self._deadline = JOINING  # seconds for an answer; as the server says it
        self.resets = 0
        self._index_resets = 0  # as the server counts them
        self._numbers = count(1)  # of reservations
        # Reservations that have not ended, and whether jobs use their pages. Guarded by _lock, as
        # are the others.
        self._open: dict[int, bool] = {}
        self._ended = native.EndedPages()
        # Taken from there: what _end() takes.
        self._reported: list[tuple[int, int, list[int]]] = []
        # _changed is notified when the thread may have something to do.
        self._lock = threading.RLock()  # taken as such: Ctrl-C may leave a Condition locked
        self._changed = threading.Condition(self._lock)
        self._connection: socket.socket | None = None
        self._meeting: socket.socket | None = None  # on which the thread waits for the others
        self._awaited: deque[Callable[[array[int]], object]] = deque()  # get the answers
        self._inbox = bytearray()
        # The generation of the server that has heard of all resets that this engine knows of; None
        # if it knows of none. 0: nobody has.
        self._resets_heard_by: int | None = None
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="kvswap-join", daemon=True)

    def __repr__(self) -> str:
        state = "no server" if self._connection is None else "connected"
        return f"{type(self).__name__}({self._path!r}, {state})"

    def join(self) -> None:
        """Connects to the server, meets the other processes of the engine, and attaches the pools
        to the server's memory.

        Raises:
            OSError: no server answers there.
            ValueError: the server refuses this cache, and says why.
            RuntimeError: the kernel does not map the memory.
        """
        connection, generation, self._deadline = connect_to(self._path)
        try:
            if self._pools is None:
                answer = self._meet(connection, generation)
            else:
                if generation != self._generation and self._generation:
                    if self._is_worker:
                        self._meet(connection, generation)
                    # First the old memory is freed: there may be no room for both.
                    self._session = self._generation = 0
                    self._pools.let_go()
                answer = self._attach(connection, generation, self._pools)
            connection.settimeout(None)
            # The kernel's own timeouts cost no system call.
            seconds = struct.pack("ll", int(self._deadline), int(self._deadline % 1 * 1e6))
            for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                connection.setsockopt(socket.SOL_SOCKET, option, seconds)
            if self._is_worker:
                connection.sendall(pack(Op.READY))
        except BaseException:
            self._hang_up(connection)
            raise
        self._use(connection, generation, *answer)

    def start(self) -> None:
        """Lets a thread join the server again when it is lost."""
        self._thread.start()

    def close(self) -> None:
        """Leaves the server. Pages that jobs still use are the worker's, if there is one.

        Idempotent. No job of a PrefixCache may be in flight.
        """
        if not self._process.is_current:  # the connection is that of the parent
            return
        with self._lock:
            self._is_closing = True
            was_told = self._say_leave()
            left, self._connection = self._connection, None
            for connection in (self._meeting, left):
                if connection is not None:  # wakes the thread
                    with contextlib.suppress(OSError):
                        connection.shutdown(socket.SHUT_RDWR)
            self._changed.notify_all()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(self._deadline)  # it may read from what is closed next
        if left is not None:
            left.close()
        if not was_told and self._session:
            self._leave_anew()

    def _say_leave(self) -> bool:
        """Whether the server will hear that the session ends. The caller holds the lock."""
        with contextlib.suppress(OSError):
            if self._connection is not None:
                self._connection.sendall(pack(Op.LEAVE))
                return True
        return False

    def _leave_anew(self) -> None:
        """Ends the session on another connection: a server that has closed its own, or has taken
        nothing for long, would keep the pages until this process ends. Waits for no answer."""
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(self._deadline)
            connection.connect(self._path)
            rendezvous.check_peer(connection, f"the server at {self._path}")
            connection.sendall(pack(Op.LEAVE, [self._session, self._generation]))

    def _hang_up(self, connection: socket.socket) -> None:
        """Closes a connection on which the thread was joining."""
        if self._is_closing:
            with contextlib.suppress(OSError):
                connection.sendall(pack(Op.LEAVE))
        connection.close()

    def _attach(
        self, connection: socket.socket, generation: int, pools: RemotePools
    ) -> Sequence[int]:
        """Attaches the pools, if it is the memory of another server."""
        hello = {**self._cache, **self._names, "session": self._session}
        message = pack(Op.HELLO, data=json.dumps(hello).encode())
        with contextlib.closing(open_lock()) as lock:
            rendezvous.send(connection, message, lock.fds)
        answer = receive(connection, HEAD.size + 24)[0]
        with contextlib.ExitStack() as received:
            handles = []
            for _ in pools.layouts:
                handles.append(PoolHandle.receive(connection))
                received.callback(handles[-1].close)
            if generation != self._generation:
                pools.attach(handles)
        return answer

    def _meet(self, connection: socket.socket, generation: int) -> Sequence[int]:
        """The answer when the other processes of the engine have come, for which it waits."""
        known = self._session if generation == self._generation else 0
        message = pack(Op.MEET, data=json.dumps({**self._names, "session": known}).encode())
        with self._lock:
            if self._is_closing:
                raise ConnectionError("it is closed")
            self._meeting = connection
        try:
            connection.sendall(message)
            if self._thread.is_alive():  # else the engine is being started, and all are there
                connection.settimeout(None)
            return receive(connection, HEAD.size + 24)[0]  # a reset may be right behind it
        finally:
            connection.settimeout(JOINING)
            self._meeting = None

    def _use(
        self,
        connection: socket.socket,
        generation: int,
        session: int,
        resets: int,
        num_pages: int,
    ) -> None:
        with self._lock:  # no call comes in between
            # Another engine has told this server of a reset, but of none that nobody has heard of.
            if resets != generation and self._resets_heard_by != 0 and not self._is_worker:
                self._resets_heard_by = generation
            self._session, self._generation = session, generation
            self._index_resets, self.num_pages = resets, num_pages
            self.resets += 1
            if self._is_closing:
                return self._hang_up(connection)
            self._connection = connection
            # The second tier of another server may have pages from before a reset.
            if self._resets_heard_by not in (None, generation):
                self.reset()

    def _has_jobs(self) -> bool:
        """Whether a job uses a page. A worker leaves that to its scheduler, which it meets."""
        return any(self._open.values())

    def _until_lost(self) -> None:
        """Waits until the server is lost, and may be joined again."""
        while self._is_worker and (connection := self._connection) is not None:
            try:
                why = "" if connection.recv(1) else "it has closed the connection"
            except BlockingIOError:  # the time of a call is over
                continue
            except OSError as error:
                why = str(error)
            with self._lock:
                if why and self._connection is connection:
                    self._lose(why)
        with self._lock:
            self._changed.wait_for(
                lambda: self._is_closing or (self._connection is None and not self._has_jobs())
            )

    def _run(self) -> None:
        """The thread: joins the server again each time that it is lost."""
        pause, joined, told = FIRST_PAUSE, time.monotonic(), ""
        while True:
            self._until_lost()
            with self._lock:
                if time.monotonic() - joined > LONGEST_PAUSE:
                    pause = FIRST_PAUSE
                if self._changed.wait_for(lambda: self._is_closing, pause):
                    return
            try:
                self.join()
                log.info("the server at %s is back", self._path)
                joined, told = time.monotonic(), ""
            except (OSError, ValueError, RuntimeError, MemoryError) as error:
                if str(error) != told and not self._is_closing:
                    told = str(error)
                    log.warning("the server at %s cannot be joined again: %s", self._path, told)
            pause = min(2 * pause, LONGEST_PAUSE)

    # What anybody may call, with the keys of a group, or a list with those of each.

    def needed_blocks(self, prefix: int) -> range | list[range]:
        """See BlockManager.needed_blocks()."""
        needed = needed_blocks(self.groups, prefix)
        return needed if self._is_list else needed[0]

    def touch(self, keys: Keys | Sequence[Keys]) -> None:
        """See BlockManager.touch()."""
        self._send(pack_keys(Op.TOUCH, (), self._read(keys)))

    def order(self, keys: Keys | Sequence[Keys], *, renew: bool = False) -> None:
        """See BlockManager.order()."""
        self._send(pack_keys(Op.ORDER, [read_switch("renew", renew)], self._read(keys)))

    def reset(self) -> None:
        """Forgets all blocks, also those of other engines.

        If the server does not answer, it forgets them when it is joined again.
        """
        self._process.check("prefix cache")  # in a forked child the lock may be locked for ever
        with self._lock:
            self._resets_heard_by = 0
            if self._connection is not None:
                self._count_reset()
                self._send(pack(Op.RESET), self._heard_reset)

    def _count_reset(self) -> None:
        self.resets += 1
        self._index_resets += 1

    def _heard_reset(self, _: array[int]) -> None:
        if self._heard_reset not in self._awaited:
            self._resets_heard_by = self._generation

    def _read(self, keys: Keys | Sequence[Keys]) -> list[bytes]:
        if not self._is_list:
            return [native.join_keys("keys", keys)]
        split = enumerate(split_groups("keys", keys, len(self.groups)))
        return [native.join_keys(f"keys[{group}]", of_group) for group, of_group in split]

    # Reservations.

    def _reserve(self, is_load: bool, is_lease: bool = False) -> RemoteReservation:
        """Made before the server is asked: if the caller raises then, it ends as any other."""
        self._process.check("prefix cache")
        with self._lock:
            made = RemoteReservation(next(self._numbers), self._ended, is_load)
            self._open[made.id] = not is_lease
        return made

    def end_reported(self) -> None:
        """Tells the server which reservations have ended."""
        self._process.check("prefix cache")
        with self._lock:
            self._ended.take(self._reported)
            while self._reported:
                self._end(*self._reported[0])
                self._reported.pop(0)

    def _end(self, number: int, outcome: int, rejected: Sequence[int]) -> None:
        """A reservation has ended: see Op.END. The caller holds the lock."""
        if number not in self._open:  # it has reserved nothing, or with another server
            return
        try:
            self._exchange(pack(Op.END, [number, outcome, *rejected]))
            self._drop(number)
        except BaseException:  # it must not be said twice
            self._lose("a call was interrupted")
            raise

    def _drop(self, number: int) -> None:
        """Forgets a reservation. The caller holds the lock."""
        self._open.pop(number, None)
        self._job_ended()

    # Messages. The caller holds the lock.

    def _send(self, message: bytes, *then: Callable[[array[int]], object]) -> None:
        """Sends a message if there is a server, behind what has ended. `then` get the answers."""
        self._process.check("prefix cache")
        with self._lock:
            self.end_reported()
            self._exchange(message, *then)

    def _exchange(self, message: bytes, *then: Callable[[array[int]], object]) -> None:
        raise NotImplementedError

    def _receive(self, flags: int = 0) -> None:
        """Takes what has come. Raises OSError if that is nothing, and ValueError if the server
        refuses what was asked."""
        assert self._connection is not None
        data = self._connection.recv(READ_BYTES, flags)
        if not data:
            raise ConnectionError("it has closed the connection")
        self._inbox += data
        while (message := next_message(self._inbox)) is not None:
            status, numbers, text = message
            if status == Status.RESET:
                self._count_reset()
                if self._resets_heard_by is None:
                    self._resets_heard_by = self._generation
                continue
            answered = self._awaited.popleft()
            if status == Status.REFUSED:
                raise ValueError(text.decode())
            answered(numbers)

    def _forget(self) -> None:
        """Forgets what belongs to a server that is gone, but not the jobs."""
        self._inbox.clear()
        self._awaited.clear()
        self._open = {number: True for number, has_job in self._open.items() if has_job}

    def _lose(self, why: str) -> None:
        """The caller holds the lock."""
        if self._connection is None or self._is_closing:  # the thread reads until close() closes it
            return
        log.warning("lost the server at %s and its pages: %s", self._path, why)
        self.resets += 1
        self._connection.close()
        self._connection = None
        self._forget()
        self._changed.notify_all()

    def _job_ended(self) -> None:
        """The caller holds the lock."""
        if self._connection is None and not self._has_jobs():
            self._changed.notify_all()


class RemoteManager(Session):
    """The index of a server, which other engines change, too: `manager` of PrefixCache.connect().

    A call that needs an answer waits for it, at most for the server's deadline. Without a server
    lookups find nothing, and loads and stores get no pages. What one engine is storing is pending
    for all.

    Any thread may call any method. In a forked child every call raises RuntimeError.

    Attributes:
        groups, unit_tokens: see BlockManager.
    """

    _pools: RemotePools

    def __init__(
        self,
        path: str,
        cache: dict[str, object],
        pools: RemotePools,
        groups: int | Sequence[BlockGroup],
    ) -> None:
        super().__init__(path, cache, pools, groups)
        self._dropped = 0  # stores without a server; guarded by _lock

    # What a PrefixCache calls, with the keys of each group. It gets lists with an item for each.

    def _lookup(self, keys: list[bytes], *, again: bool = False) -> Lookup:
        """See BlockManager.lookup()."""
        how = Ask.AGAIN if read_switch("again", again) else Ask.LOOK
        answer = self._ask(pack_keys(Op.ASK, [how, 0], keys))
        return _NOTHING if answer is None else Lookup(*answer[:4])

    def _prepare_load(self, keys: list[bytes]) -> RemoteReservation | None:
        """See BlockManager.prepare_load()."""
        made = self._reserve(is_load=True)
        with self._lock:
            answer = self._ask(pack_keys(Op.ASK, [Ask.LOAD, made.id], keys))
            if answer is None or len(answer) * KEY_BYTES < sum(map(len, keys)):
                self._drop(made.id)
                return None
            made.pages = _split(answer, keys)
        return made

    def _prepare_store(self, keys: list[bytes]) -> RemoteReservation | None:
        """See BlockManager.prepare_store()."""
        return self._borrow(keys)

    def _preempt(self, keys: list[bytes]) -> RemoteReservation | None:
        """See BlockManager.preempt()."""
        return self._borrow(keys, is_leased=True)

    def stats(self, group: int = 0) -> BlockStats:
        """The server's statistics of a group, of all engines; zeros without a server.

        `refused` also counts the stores of this engine that found no server.
        """
        group = read_int("group", group, 0, len(self.groups) - 1)
        answer = self._ask(pack(Op.STATS, [group]))
        fields = len(dataclasses.fields(BlockStats))
        stats = BlockStats(*([0] * fields if answer is None else answer))
        return dataclasses.replace(stats, refused=stats.refused + self._dropped)

    # Messages.

    def _ask(self, message: bytes) -> array[int] | None:
        """The server's answer; None if there is no server."""
        answers: list[array[int]] = []
        self._send(message, answers.append)
        return answers[0] if answers else None

    def _exchange(self, message: bytes, *then: Callable[[array[int]], object]) -> None:
        """Waits for the answers."""
        if self._connection is None:
            return
        try:
            self._awaited.extend(then)
            self._connection.sendall(message)
            while self._awaited:
                self._receive()
        except BlockingIOError:
            self._lose(f"it did not answer within {self._deadline:g} s")
        except OSError as error:
            self._lose(str(error))
        except ValueError:  # the server has refused it, and reserves nothing
            raise
        except BaseException:  # an answer, or what it reserves, would be nobody's
            self._lose("a call was interrupted")
            raise

    def _borrow(self, keys: list[bytes], is_leased: bool = False) -> RemoteReservation | None:
        """Borrows a page for each key that has none. is_leased: all keys keep theirs for longer."""
        made = self._reserve(is_load=False)
        lease = self._reserve(is_load=True, is_lease=True) if is_leased else None
        with self._lock:
            numbers = made.id, 0 if lease is None else lease.id
            answer = self._ask(pack_keys(Op.RESERVE, numbers, keys))
            if self._connection is None:
                self._dropped += 1
            if not answer:
                self._drop(made.id)
                return None
            lent, pages = answer[0], _split(answer[1:], keys)
            indices: list[Any] = [range(len(of_group)) for of_group in pages]
            if lent < sum(map(len, pages)):
                indices = [np.flatnonzero(of_group >= 0) for of_group in pages]
                pages = [of_group[its] for of_group, its in zip(pages, indices, strict=True)]
            if not lent:
                self._drop(made.id)
                made = RemoteReservation(0, self._ended, False)
            made.key_indices, made.pages, made.lease = indices, pages, lease
            return made


def _split(numbers: array[int], keys: list[bytes]) -> list[Int64Array]:
    """The numbers of the keys of each group."""
    every: Int64Array = np.asarray(numbers)
    ends = accumulate((len(of_group) // KEY_BYTES for of_group in keys), initial=0)
    return [every[start:end] for start, end in pairwise(ends)]


class RemotePools:
    """The pools of a prefix cache on a server's memory. Without a server, pools of one page each.

    Args:
        layouts (Sequence[PagedLayout]): of the cache; changes with rebind().
        options: of the pools of one page.
        rank (int): which part of each page this process has: see HostPool.attach().

    Attributes:
        pools (list[HostPool]): changes in place.
        handler (OffloadHandler | None): once there is one, it gets the pools too.
        changing (Lock): held while the handler is rebound.
    """

    def __init__(
        self,
        layouts: Sequence[PagedLayout],
        options: dict[str, Any],
        rank: int = 0,
    ) -> None:
        self.layouts, self._options = layouts, options
        self._rank = rank
        self.pools: list[HostPool] = []
        self.handler: OffloadHandler | None = None
        self.changing = threading.Lock()

    def attach(self, handles: Sequence[PoolHandle]) -> None:
        """Maps and pins the server's memory, and uses it."""
        both = zip(self.layouts, handles, strict=True)
        self._use([HostPool.attach(layout, one, rank=self._rank) for layout, one in both])

    def let_go(self) -> None:
        """Frees the memory of a server that is gone. No job may be in flight."""
        self._use([HostPool(layout, 1, **self._options) for layout in self.layouts])

    def rebind(self, gpu: PagedLayout | Sequence[PagedLayout]) -> None:
        """OffloadHandler.rebind(): later servers get the new cache, and the old one is let go."""
        assert self.handler is not None
        with self.changing:
            self.handler.rebind(gpu)
            self.layouts = self.handler.layouts

    def close(self) -> None:
        """Frees the memory. The handler must be closed."""
        for pool in self.pools:
            pool.close()

    def _use(self, pools: list[HostPool]) -> None:
        with self.changing:
            if self.handler is not None:
                self.handler._rebind_to(self._groups(self.handler, pools))
            self.pools[:] = pools

    def _groups(self, handler: OffloadHandler, pools: Sequence[HostPool]) -> Groups:
        """What the handler gets."""
        layouts = handler.layouts
        return Groups(layouts, pools)


def read_model(name: str, model: object) -> tuple[str, int, int]:
    """The model of which others get the pages, the part of it, and the number of parts."""
    whole, rank, parts = model if isinstance(model, tuple) and len(model) == 3 else (model, 0, 1)
    if not isinstance(whole, str):
        raise TypeError(
            f"{name} is {kind_of(model)}; name the model and its revision, because others may use "
            "the same pages, or pass (name, rank, number of ranks)"
        )
    if not whole:
        raise ValueError(f"{name} is {model!r}, which has no name; name the model and its revision")
    parts = read_int(f"{name}[2]", parts, 1)
    return whole, read_int(f"{name}[1]", rank, 0, parts - 1), parts


def describe(
    layouts: Sequence[PagedLayout],
    groups: Sequence[BlockGroup] | None,
    model: str,
    rank: int,
    world: int,
    blocks_per_page: int,
    encoding: EncodingName,
    verify: VerifyName,
    bytes_of: Mapping[str, Any] | None = None,
    parts: int = 1,
) -> dict[str, object]:
    """What must be equal for engines to share pages; see PrefixCache.connect().

    Args:
        groups (Sequence[BlockGroup] | None): one for each layout. None: the server decides how many
            pages the only one has.
        bytes_of (Mapping[str, Any] | None): what else the bytes of a block depend on.
        parts (int): ranks that have a part of each page: see `part` of HostPool.
        others: see PrefixCache.connect().

    Raises:
        TypeError, ValueError: an argument is wrong.
    """
    contents = describe_contents(groups or [BlockGroup(1)], model, rank, world, bytes_of)
    slot_encoding, part = read_encoding(encoding), (0, parts) if parts > 1 else None
    pages = []
    for layout, of_group in zip(layouts, contents, strict=True):
        verify = read_verify(verify, layout.device)
        shape = PoolShape(layout, 1, blocks_per_page, slot_encoding, verify, part)
        pages.append(describe_page(layout._describe(), shape, slot_encoding, of_group))
    return {
        "pages": pages,
        "num_pages": [0] if groups is None else [group.num_pages for group in groups],
        "verify": verify,
    }


def connect_to(path: str) -> tuple[socket.socket, int, float]:
    """A connection to the server, its generation, as another one has other memory, and the seconds
    within which it answers.

    Raises OSError if there is none or it is another user's, ValueError if it refuses, and what
    check_path() does.
    """
    rendezvous.check_path(path)
    if os.path.exists(path) and not stat.S_ISSOCK(os.stat(path).st_mode):
        raise ConnectionError(f"{path} is not a socket; pass the --socket of a server")
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(JOINING)
        with _needs_server(path):
            connection.connect(path)
        rendezvous.check_peer(connection, f"the server at {path}")
        with _needs_server(path):
            numbers, magic = receive(connection)
        if magic != MAGIC or len(numbers) < 2:
            raise ConnectionError(
                f"the process that answers at {path} is not a server of this library"
            )
        version, generation, *deadline = numbers
        if version != VERSION:
            raise ConnectionError(
                f"the server at {path} has version {version} of the protocol, this library "
                f"{VERSION}; use the same release for both"
            )
    except BaseException:
        connection.close()
        raise
    return connection, generation, deadline[0] / 1e6


@contextlib.contextmanager
def _needs_server(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConnectionError(
            f"no server answers at {path}: {error}; start one with "
            f"`python -m torch_kvswap serve --socket {path} --memory ...`"
        ) from error


def receive(connection: socket.socket, at_once: int = READ_BYTES) -> tuple[array[int], bytes]:
    """The numbers and other bytes of an answer.

    Receives nothing of what is behind an answer of `at_once` bytes. Raises ValueError if the server
    refuses.
    """
    received = bytearray()
    while (message := next_message(received)) is None:
        more = connection.recv(at_once)
        if not more:
            raise ConnectionError("it has closed the connection")
        received += more
    status, numbers, data = message
    if status == Status.REFUSED:
        raise ValueError(data.decode())
    return numbers, data
