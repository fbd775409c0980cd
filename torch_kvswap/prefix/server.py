"""One index of host pages for the engines of a machine (docs/serve.md)."""

from __future__ import annotations

import contextlib
import errno
import heapq
import itertools
import json
import os
import secrets
import selectors
import socket
import time
import weakref
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial
from typing import Any

import numpy as np

from torch_kvswap._C import Reservation
from torch_kvswap._native import rendezvous
from torch_kvswap._native.arguments import bytes_text, read_int
from torch_kvswap._native.descriptors import Descriptors
from torch_kvswap._native.log import log
from torch_kvswap._native.process_lock import is_free
from torch_kvswap.below.format import PageFormat, load_checksum
from torch_kvswap.below.read_store import read_store, without_store
from torch_kvswap.below.store import PageStore
from torch_kvswap.host_pool.description import difference
from torch_kvswap.host_pool.pool import HostPool
from torch_kvswap.host_pool.system import NoRoomError
from torch_kvswap.layout import layout_like
from torch_kvswap.prefix.block_groups import BlockGroup
from torch_kvswap.prefix.hashing import KEY_BYTES
from torch_kvswap.prefix.manager import BelowPolicy, BlockManager, Lookup
from torch_kvswap.prefix.protocol import (
    JOINING,
    MAGIC,
    READ_BYTES,
    VERSION,
    Ask,
    KeyState,
    Op,
    Outcome,
    ProtocolError,
    Status,
    next_message,
    pack,
    unpack_keys,
)
from torch_kvswap.prefix.tier import Tier

DEADLINE = 1.0  # seconds that an engine waits for an answer, unless a server has others
QUARANTINE = 5.0  # seconds before pages that a dead engine was writing are reused
_LEAST_DEADLINE, _MOST_DEADLINE = 0.001, 3600.0
_LOCK_SECONDS = 0.1  # between checks whether a dead engine's forked children have ended
_PAUSE_SECONDS = 1.0  # without new connections, after the file descriptors have run out
_TIER_SECONDS = 1.0  # between checks for calls of the tier that have timed out
_MAX_LENT_SHARE = 1 / 4  # of the pages that may be lent, divided among the borrowers
_NOTHING, _NO_PAGES = Lookup(0, 0, 0), np.empty(0, np.int64)
_NO_DESCRIPTORS = errno.EMFILE, errno.ENFILE


class Stage(IntEnum):
    """How far a session has come. An engine in one process and a scheduler become members, a worker
    ready; it says MEET first if it comes from another server.
    """

    CAME = 0  # it has to say who it is
    WAITS = 1  # it has said MEET, and has no answer yet
    MEMBER = 2  # its cache fits to the pages; of a scheduler, all its workers are ready
    READY = 3  # a worker that has pinned the memory
    OVER = 4  # a scheduler that has ended; its pages are its workers'


@dataclass(eq=False)
class _Session:
    """An engine, or its scheduler or one of its workers if these are processes of their own. It
    outlives its connection while it has pages and its process lives, those of its workers, and
    those that were forked from them.
    """

    number: int  # names it when it connects again
    connection: socket.socket | None  # None when it is lost
    process: int  # a file descriptor, readable when the process has ended
    pid: int
    lock: Descriptors | None = None  # see process_lock.is_free(); a scheduler has none
    is_dead: bool = False  # its process has ended
    received: bytearray = field(default_factory=bytearray)  # of a message that is not complete
    unsent: bytes = b""  # what it has not taken; until then nothing is received from it
    engine: str = ""  # its name, if scheduler and workers are sessions of their own
    worker: int = 0  # its number among the workers
    workers: int = 0  # of a scheduler: how many its engine has
    stage: Stage = Stage.CAME
    deadline: float = 0.0  # by which it must have said HELLO or MEET
    held: dict[int, Reservation] = field(default_factory=dict)  # by the engine's numbers
    lent: set[int] = field(default_factory=set)  # pages that it has borrowed

    @property
    def is_scheduler(self) -> bool:
        return self.workers > 0

    @property
    def is_worker(self) -> bool:
        return bool(self.engine) and not self.is_scheduler

    @property
    def is_member(self) -> bool:
        return self.stage >= Stage.MEMBER

    @property
    def is_over(self) -> bool:
        return self.stage == Stage.OVER

    @property
    def has_pages(self) -> bool:
        return bool(self.held or self.lent)


class _Pages:
    """The memory, the block manager and the tier, made for the first engine to connect.

    Args:
        cache: what an engine says of its cache; see client.describe().
        memory (int): bytes of all pages, at most.
        on_answer: called, in a thread of the tier, when poll() has something to do.

    Raises:
        KeyError, TypeError, ValueError: the description is wrong, or the memory is too small or
            not there.
    """

    def __init__(
        self,
        cache: dict[str, Any],
        memory: int,
        store: PageStore | None,
        below_policy: BelowPolicy,
        on_answer: Callable[[], None],
    ) -> None:
        self.cache = cache
        self.pools: list[HostPool] = []
        groups = []
        for page, wanted in zip(cache["pages"], cache["num_pages"], strict=True):
            layout = layout_like(page["tensors"])
            options = {"encoding": page["encoding"], "verify": cache["verify"]}
            if page["parts"]:
                options["part"] = 0, page["parts"]
            per_page = page["blocks_per_page"]
            size = HostPool.page_bytes_of(layout, per_page, **options)
            count = wanted or memory // size
            left = memory - sum(pool.nbytes for pool in self.pools)
            if count * size > left or not count:
                raise ValueError(
                    f"{max(count, 1)} pages of {size} bytes do not fit into the "
                    f"{bytes_text(left)} that this server has left for them; start it with more "
                    "--memory"
                )
            try:
                self.pools.append(HostPool(layout, count, per_page, **options, shared=True))
            except NoRoomError as error:
                if wanted:  # the engine can ask for fewer
                    raise
                raise _too_much(memory, error) from error
            fields = {name: page[name] for name in ("block_tokens", "window_tokens", "is_state")}
            groups.append(BlockGroup(count, **fields))
        below = None if store is None else below_policy
        self.manager = BlockManager(groups, below_policy=below)
        self.tier: Tier | None = None
        if store is not None:
            formats = list(map(PageFormat, self.pools, cache["pages"]))
            self.tier = Tier(
                store,
                formats,
                self.pools,
                self.manager,
                lambda _: None,  # engines mark the pages that they load
                on_answer,
            )
            self.tier.start()


def _too_much(memory: int, error: NoRoomError) -> ValueError:
    """The machine has no room for all of the server's memory."""
    room = error.room >> 20
    less = f"start it with --memory {room}MiB or less, or " if room > 0 else ""
    return ValueError(
        f"this server has {bytes_text(memory)} of --memory, but {error.problem}; {less}"
        f"{error.otherwise}"
    )


class PageServer:
    """Serves engines at a Unix socket: reservations are messages, pages are shared memory.

    One thread, in run(), does everything. An engine that is slow, sends garbage or dies harms no
    other one. What an engine has reserved is its own until it says so or its process has ended.

    Args:
        path (str): of the socket, which is made with mode 0600.
        memory (int): bytes of all pages, at most. They are made for the first engine that comes.
        below (str | None), below_policy (str): see PrefixCache.
        deadline (float): seconds that an engine waits for an answer before it gives the server up.

    Raises:
        RuntimeError: another server has this socket.
        OSError: the socket cannot be made, or `below` cannot be opened. FileExistsError: a file
            that is no socket has this name. PermissionError: one of another user has it.
        ImportError: see `below` of PrefixCache.
        TypeError, ValueError: path is none of a socket, deadline is out of range, the machine has
            too little memory, or below_policy comes without below; and see `below` of PrefixCache.
    """

    def __init__(
        self,
        path: str,
        memory: int,
        below: str | None = None,
        below_policy: BelowPolicy = "reused",
        deadline: float = DEADLINE,
    ) -> None:
        self._path, self._memory = path, read_int("memory", memory, 1)
        if not _LEAST_DEADLINE <= deadline <= _MOST_DEADLINE:
            raise ValueError(
                f"deadline is {deadline!r}; it must be {_LEAST_DEADLINE:g} to {_MOST_DEADLINE:g} s"
            )
        # Engines may still map the memory of an earlier server, which they free when they join this
        # one: what is available now does not count.
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if memory > total:
            raise ValueError(
                f"this server has {bytes_text(memory)} of --memory, but the machine has "
                f"{bytes_text(total)}; start it with less"
            )
        self._deadline = deadline
        self._below_policy = below_policy
        self._generation = secrets.randbits(62) + 1  # 0 is none
        self._numbers = itertools.count(1)
        self._sessions: dict[int, _Session] = {}
        self._made: _Pages | None = None
        self._is_over, self._some_ended = False, False
        self._clock = time.monotonic
        self._timers: list[tuple[float, int, Callable[[], None]]] = []  # a heap, see _later()
        self._timer_numbers = itertools.count()
        self._handlers: dict[int, Callable[[_Session, array[int], bytes], None]] = {
            op: getattr(self, f"_on_{op.name.lower()}") for op in Op
        }
        with contextlib.ExitStack() as undo:
            self._store: PageStore | None = None
            if below is None and below_policy != "reused":
                raise without_store(["below_policy"])
            if below is not None:
                open_store = read_store(below)
                load_checksum()  # raises here, not when an engine comes
                self._store = open_store()
                undo.callback(self._store.close)
            self._listener, self._lock_file = rendezvous.listen(path)
            undo.callback(os.close, self._lock_file)
            undo.callback(self._listener.close)
            self._spare: int | None = os.dup(self._lock_file)  # see _refuse_next()
            undo.pop_all()
        self._selector = selectors.DefaultSelector()
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        weakref.finalize(self, os.close, self._wake_fd)  # stop() may come after run() has ended
        self._is_full = False  # whether it was said that there are no descriptors
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._wake_fd, selectors.EVENT_READ, self._woken)

    def run(self) -> None:
        """Serves until stop() is called, then closes everything. Engines go on without pages."""
        try:
            while not self._is_over:
                tier = None if self._made is None else self._made.tier
                seconds = [] if tier is None else [_TIER_SECONDS]
                if self._timers:
                    seconds.append(max(self._timers[0][0] - self._clock(), 0.0))
                for key, events in self._selector.select(min(seconds, default=None)):
                    self._do(key.data, key.fileobj, events)
                while self._timers and self._timers[0][0] <= self._clock():
                    self._do(heapq.heappop(self._timers)[2])
                if tier is not None:
                    self._do(self._poll, tier)
        finally:
            self._close()

    def _do(self, call: Callable[..., None], *arguments: object) -> None:
        """Whatever one engine causes, the others are served."""
        try:
            call(*arguments)
        except Exception:
            log.exception("an error in the server, which goes on")

    def _poll(self, tier: Tier) -> None:
        tier.poll(some_ended=self._some_ended)
        self._some_ended = False

    def stop(self) -> None:
        """Ends run(). Any thread may call, and a signal handler."""
        self._is_over = True
        os.eventfd_write(self._wake_fd, 1)

    def _close(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)
        for session in list(self._sessions.values()):
            self._end_session(session)
        if self._made is not None and self._made.tier is not None:
            self._made.tier.close()
        elif self._store is not None:
            self._store.close()
        self._selector.close()
        self._listener.close()
        if self._spare is not None:
            os.close(self._spare)
        os.close(self._lock_file)

    def _later(self, seconds: float, call: Callable[[], None]) -> None:
        """Calls it in run(), after so many seconds."""
        heapq.heappush(self._timers, (self._clock() + seconds, next(self._timer_numbers), call))

    # Connections.

    def _woken(self, *_: object) -> None:
        os.eventfd_read(self._wake_fd)

    def _wake(self) -> None:
        os.eventfd_write(self._wake_fd, 1)

    def _accept(self, *_: object) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            if error.errno in _NO_DESCRIPTORS:
                self._refuse_next()
            return  # else it has gone already
        connection.setblocking(False)
        try:
            pid, process = rendezvous.peer_of(connection)
        except OSError as error:
            if error.errno in _NO_DESCRIPTORS:
                return self._refuse_full(connection)
            log.warning("a process is not served: %s", error)
            return _refuse(connection, str(error))
        self._is_full = False
        session = _Session(next(self._numbers), connection, process, pid)
        try:
            self._selector.register(
                process, selectors.EVENT_READ, lambda *_: self._process_ended(session)
            )
            self._selector.register(
                connection, selectors.EVENT_READ, lambda _, events: self._serve(session, events)
            )
        except OSError as error:
            self._unwatch(session)
            os.close(process)
            text = f"the kernel watches no more engines: {error}; see fs.epoll.max_user_watches"
            log.warning("process %d is not served: %s", pid, text)
            return _refuse(connection, text)
        self._sessions[session.number] = session
        greeting = VERSION, self._generation, int(self._deadline * 1e6)
        self._send(session, pack(Status.DONE, greeting, MAGIC))
        self._expect_hello(session)

    def _refuse_next(self) -> None:
        """Tells an engine that there are no file descriptors, with the one that is kept for this.

        Otherwise the listener would stay readable, and select() would return at once, for ever.
        """
        self._selector.unregister(self._listener)
        if self._spare is not None:
            os.close(self._spare)
            self._spare = None
            with contextlib.suppress(OSError):
                self._refuse_full(self._listener.accept()[0])
        self._listen_again()

    def _refuse_full(self, connection: socket.socket) -> None:
        text = "this server has no file descriptors left; raise its limit (ulimit -n)"
        if not self._is_full:
            self._is_full = True
            log.warning("an engine cannot connect: %s", text)
        _refuse(connection, text)

    def _listen_again(self) -> None:
        """Waits for connections, once a descriptor is reserved."""
        try:
            if self._spare is None:
                self._spare = os.dup(self._lock_file)
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        except OSError:
            self._later(_PAUSE_SECONDS, self._listen_again)

    def _expect_hello(self, session: _Session) -> None:
        """Disconnects a session that does not say HELLO or MEET in time."""
        session.deadline = self._clock() + JOINING
        self._later(JOINING, lambda: self._end_silent(session))

    def _end_silent(self, session: _Session) -> None:
        is_silent = session.stage == Stage.CAME and session.deadline <= self._clock()
        if is_silent and session.connection is not None:
            log.warning("process %d has sent nothing for %g s", session.pid, JOINING)
            self._disconnect(session)

    def _serve(self, session: _Session, events: int) -> None:
        """Receives, or sends the rest of an answer."""
        connection = session.connection
        if connection is None:  # lost since select() has returned
            return
        try:
            if events & selectors.EVENT_WRITE:
                self._send(session)
            else:
                try:
                    data = self._receive(session, connection)
                except BlockingIOError:  # nothing has come
                    return
                if not data:
                    return self._disconnect(session)
                session.received += data
            while not session.unsent and (message := next_message(session.received)) is not None:
                self._handle(session, *message)
        except Exception as error:  # it ends this connection only
            if session.connection is not None:
                text = str(error) or type(error).__name__
                log.warning("the connection of process %d is closed: %s", session.pid, text)
                self._disconnect(session)

    def _receive(self, session: _Session, connection: socket.socket) -> bytes:
        if session.is_member:
            return connection.recv(READ_BYTES)
        data, came = rendezvous.receive(connection, READ_BYTES)
        if came.fds:
            is_free(came.fd)  # raises OSError if it can be no lock
            if session.lock is not None:
                session.lock.close()
            session.lock = came
        return data

    def _handle(self, session: _Session, op: int, numbers: array[int], data: bytes) -> None:
        # A member has said HELLO or MEET, once. LEAVE may come first: for a session that is lost.
        is_in_turn = op == Op.LEAVE or session.is_member != (op in (Op.HELLO, Op.MEET))
        if op not in self._handlers or not is_in_turn:
            raise ProtocolError(f"{op} is no request{'' if session.is_member else ' before HELLO'}")
        try:
            self._handlers[op](session, numbers, data)
        except ValueError as error:
            if not session.is_member:
                self._refuse(session, error)
            raise

    def _refuse(self, session: _Session, error: ValueError) -> None:
        self._send(session, pack(Status.REFUSED, data=str(error).encode()))

    def _answer(self, session: _Session, numbers: Iterable[int] = ()) -> None:
        self._send(session, pack(Status.DONE, numbers))

    def _send(self, session: _Session, data: bytes = b"") -> None:
        """Sends it, or keeps what the engine does not take, and then receives nothing from it."""
        assert session.connection is not None
        had_some, data, sent = bool(session.unsent), session.unsent + data, 0
        try:
            sent = session.connection.send(data)
        except BlockingIOError:
            pass
        except OSError:  # it has gone, and the next recv() says so: perhaps it has said LEAVE
            sent = len(data)
        session.unsent = data[sent:]
        if had_some != bool(session.unsent):
            events = selectors.EVENT_WRITE if session.unsent else selectors.EVENT_READ
            key = self._selector.get_key(session.connection)
            self._selector.modify(session.connection, events, key.data)

    def _disconnect(self, session: _Session) -> None:
        """What the engine has reserved stays its own while its process lives."""
        if session.connection is not None:
            self._selector.unregister(session.connection)
            session.connection.close()
            session.connection = None
            session.received.clear()
            if session.stage == Stage.WAITS:
                session.stage = Stage.CAME
        if not session.has_pages and not (session.is_member and session.is_worker):
            self._end_session(session)

    def _process_ended(self, session: _Session) -> None:
        if session.number not in self._sessions:  # dropped since select() has returned
            return  # its descriptor may have become another engine's
        session.is_dead = True
        self._unwatch(session)
        self._await_forks(session)

    def _unwatch(self, session: _Session) -> None:
        if session.process in self._selector.get_map():
            self._selector.unregister(session.process)

    def _await_forks(self, session: _Session) -> None:
        """Ends the session of a process that has ended when what was forked from it has, too: until
        then its copies may run.
        """
        if session.number not in self._sessions:
            return
        are_gone = session.lock is None
        if session.lock is not None:
            with contextlib.suppress(OSError):  # the kernel has no memory to say so: later
                are_gone = is_free(session.lock.fd)
        if are_gone:
            self._end_session(session)
        else:
            self._later(_LOCK_SECONDS, lambda: self._await_forks(session))

    def _end_session(self, session: _Session) -> None:
        """No copy of the engine uses a page any more: its process has ended, or it says so.

        The copies of a scheduler's pages are its workers': they may still run.
        """
        if session.number not in self._sessions:
            return
        others = self._of_engine(session)
        is_in_use = session.is_scheduler and session.has_pages
        if is_in_use and any(other.is_member for other in others):
            if not session.is_over:
                session.stage = Stage.OVER
                self._unwatch(session)
                self._disconnect(session)
            return
        self._drop(session)
        for other in others:
            if other.is_over:
                self._end_session(other)

    def _of_engine(self, session: _Session) -> list[_Session]:
        """The sessions of the other role of the same engine."""
        return [
            other
            for other in self._sessions.values()
            if session.engine and other.engine == session.engine
            if other.is_scheduler != session.is_scheduler
        ]

    def _drop(self, session: _Session) -> None:
        """Frees what an engine has reserved, and forgets it. What an engine that has not said that
        its copies have ended may have been writing is freed later.
        """
        del self._sessions[session.number]
        self._unwatch(session)
        os.close(session.process)
        if session.lock is not None:
            session.lock.close()
        held, lent = list(session.held.values()), list(session.lent)
        session.held.clear()
        session.lent.clear()
        self._disconnect(session)

        def free() -> None:
            for one in held:
                one.let_go()
            if lent:
                self._manager._take_back(lent)
            self._some_ended = True

        writes = bool(lent) or any(one.fills for one in held)
        if writes and (session.is_dead or session.is_over):
            self._later(QUARANTINE, free)
        else:
            free()

    # Requests.

    @property
    def _pages(self) -> _Pages:
        assert self._made is not None
        return self._made

    @property
    def _manager(self) -> BlockManager:
        return self._pages.manager

    @property
    def _index(self) -> int:
        """What engines know of resets: another number after each, and for each server."""
        return self._generation + (0 if self._made is None else self._made.manager.resets)

    def _keys(self, counts: Sequence[int], keys: bytes) -> list[bytes]:
        """The keys of each group."""
        if len(counts) != len(self._pages.pools):
            raise ProtocolError(f"keys of {len(counts)} groups")
        return unpack_keys(counts, keys)

    def _on_hello(self, session: _Session, _: array[int], data: bytes) -> None:
        """Takes in an engine, and sends it the memory."""
        if session.lock is None or is_free(session.lock.fd):
            raise ValueError("this engine has not sent a lock that its process holds")
        cache = json.loads(data)
        self._enter(session, cache)
        if self._made is None:
            try:
                self._made = _Pages(
                    cache, self._memory, self._store, self._below_policy, self._wake
                )
            except (OSError, ImportError, RuntimeError) as error:
                raise ValueError(str(error)) from error
        different = difference(cache, self._pages.cache, ("here", f"at {self._path}"))
        if different is not None:
            raise ValueError(
                f"the server has other pages: {different}; start a server of its own for this cache"
            )
        assert session.connection is not None
        session.stage = Stage.MEMBER
        self._answer(session, [session.number, self._index, self._pages.pools[0].num_pages])
        for pool in self._pages.pools:
            with contextlib.closing(pool.share()) as handle:
                try:
                    handle.send(session.connection)
                except BlockingIOError as error:
                    raise ConnectionError("its socket has no room for the pages' handle") from error

    def _enter(self, session: _Session, said: dict[str, Any]) -> None:
        """Names a session, and ends the one that the same process has had before, of which no job
        is in flight. Raises ValueError if another engine has this name.
        """
        session.engine = said.pop("engine")
        session.worker, session.workers = int(said.pop("worker")), int(said.pop("workers"))
        earlier = self._sessions.get(said.pop("session"))
        if earlier is not None and earlier.pid == session.pid and earlier is not session:
            self._drop(earlier)
        for other in list(self._sessions.values()):
            is_same = (
                other.engine == session.engine
                and other.worker == session.worker
                and other.is_scheduler == session.is_scheduler
            )
            if not (session.engine and is_same and other.is_member and not other.is_over):
                continue
            if other.connection is None and other.pid == session.pid and not other.is_dead:
                self._drop(other)  # it has not heard that it had joined
            else:
                raise ValueError(
                    f"another engine, process {other.pid}, has the name {session.engine!r} at "
                    f"{self._path}; give each engine its own engine_id"
                )

    def _on_meet(self, session: _Session, _: array[int], data: bytes) -> None:
        self._enter(session, json.loads(data))
        session.stage = Stage.WAITS
        self._introduce(session)

    def _on_ready(self, session: _Session, *_: object) -> None:
        session.stage = Stage.READY
        self._introduce(session)

    def _introduce(self, session: _Session) -> None:
        """Answers the processes of this engine that wait for others: the scheduler for all workers
        to be ready, and these for the scheduler.
        """
        for one in [session, *self._of_engine(session)]:
            others = [other for other in self._of_engine(one) if not other.is_over]
            ready = sum(other.stage == Stage.READY for other in others)
            if one.stage == Stage.WAITS and (ready == one.workers if one.is_scheduler else others):
                pages = 0 if self._made is None else self._made.pools[0].num_pages
                one.stage = Stage.MEMBER if one.is_scheduler else Stage.CAME
                self._answer(one, [one.number, self._index, pages])
                if not one.is_member:
                    self._expect_hello(one)

    def _on_ask(self, session: _Session, numbers: array[int], data: bytes) -> None:
        how, number, *counts = numbers.tolist()
        lists, groups, answer = unpack_keys(counts, data), len(self._pages.pools), array("q")
        if not lists or len(lists) % groups:
            raise ProtocolError(f"keys of {len(lists)} groups")
        for at in range(0, len(lists), groups):
            of_groups = lists[at : at + groups]
            if how in (Ask.LOOK, Ask.AGAIN):
                answer.extend(self._look(of_groups, how == Ask.AGAIN))
            else:
                answer += self._hold(session, number + at // groups, Ask(how), of_groups)
        self._answer(session, answer)

    def _look(self, of_groups: list[bytes], again: bool) -> Lookup:
        found, tier = self._manager._lookup(of_groups, again=again), self._pages.tier
        return found if tier is None else tier.ask(found, of_groups)

    def _hold(self, session: _Session, number: int, how: Ask, of_groups: list[bytes]) -> array[int]:
        """What is answered for a list of keys whose pages are to be held."""
        is_load = how == Ask.LOAD
        held = self._manager._prepare_load(of_groups) if is_load else self._manager._hold(of_groups)
        if held is not None:
            self._keep(session, number, held)
        elif is_load:
            return array("q")
        return _page_of_each(of_groups, held, partial(self._look, of_groups, again=True))

    def _keep(self, session: _Session, number: int, held: Reservation) -> None:
        """Holds pages for an engine until END, or until it has ended."""
        if number in session.held:
            raise ProtocolError(f"it holds something as {number} already")
        session.held[number] = held

    def _on_end(self, session: _Session, numbers: array[int], _: bytes) -> None:
        number, how, *rejected = numbers.tolist()
        outcome = Outcome(how)
        if len(rejected) % 2:
            raise ProtocolError("it rejects a page without its group")
        held = session.held.pop(number, None)  # it may have held nothing
        if held is not None:
            held._end(outcome, rejected)
        self._some_ended = True

    def _on_borrow(self, session: _Session, numbers: array[int], _: bytes) -> None:
        (most,) = numbers
        lent_to = sum(bool(one.lent) for one in self._sessions.values() if one is not session)
        share = max(int(self._pages.pools[0].num_pages * _MAX_LENT_SHARE / (lent_to + 1)), 1)
        pages = self._manager._lend(max(min(most, share - len(session.lent)), 0)).tolist()
        session.lent.update(pages)
        self._answer(session, pages)

    def _on_reserve(self, session: _Session, numbers: array[int], data: bytes) -> None:
        number, lease, *counts = numbers.tolist()
        of_groups = self._keys(counts, data)
        call = self._manager._preempt if lease else self._manager._prepare_store
        try:
            store = call(of_groups)
        except ValueError as error:  # a key occurs twice
            return self._refuse(session, error)
        if store is None:
            return self._answer(session)
        if store.id:
            self._keep(session, number, store)
        if store.lease is not None:
            self._keep(session, lease, store.lease)
        lent = sum(map(len, store.pages))
        self._answer(session, array("q", [lent]) + _page_of_each(of_groups, store))

    def _on_give_back(self, session: _Session, numbers: array[int], data: bytes) -> None:
        resets, *pages = numbers.tolist()
        if not session.lent.issuperset(pages) or len({*pages}) < len(pages):
            raise ProtocolError("it names a page that it has not borrowed, or one twice")
        if data and resets == self._index:
            self._manager._publish(pages, data)
        else:
            self._manager._take_back(pages)
        session.lent.difference_update(pages)
        self._some_ended = True

    def _on_touch(self, _: _Session, numbers: array[int], data: bytes) -> None:
        self._manager.touch(self._keys(numbers.tolist(), data))

    def _on_order(self, _: _Session, numbers: array[int], data: bytes) -> None:
        renew, *counts = numbers.tolist()
        self._manager.order(self._keys(counts, data), renew=bool(renew))

    def _on_stats(self, session: _Session, numbers: array[int], _: bytes) -> None:
        self._answer(session, self._manager._stats(numbers[0]))

    def _on_reset(self, session: _Session, *_: object) -> None:
        self._manager.reset()
        self._answer(session)
        for other in self._sessions.values():
            is_told = other.is_member and not other.is_worker and other.connection is not None
            if is_told and other is not session:
                self._send(other, pack(Status.RESET))

    def _on_leave(self, session: _Session, numbers: array[int], _: bytes) -> None:
        """Ends a session, or one of the same process that has lost its connection."""
        number, generation = numbers or (session.number, self._generation)
        ended = self._sessions.get(number)
        if generation == self._generation and ended is not None and ended.pid == session.pid:
            self._end_session(ended)
        self._end_session(session)


def _page_of_each(
    keys: list[bytes],
    reserved: Reservation | None,
    look: Callable[[], Lookup] = lambda: _NOTHING,
) -> array[int]:
    """For each key the page that is reserved for it. look: finds out which of the others arrive."""
    answer = array("q")
    for group, of_group in enumerate(keys):
        numbers = _NO_PAGES if reserved is None else reserved.pages[group]
        if len(numbers) * KEY_BYTES < len(of_group):
            found, numbers = look(), np.full(len(of_group) // KEY_BYTES, KeyState.ABSENT, np.int64)
            numbers[: found.found + found.asking] = KeyState.ARRIVES  # a scheduler has one group
            if reserved is not None:
                numbers[reserved.key_indices[group]] = reserved.pages[group]
        answer.frombytes(numbers.tobytes())
    return answer


def _refuse(connection: socket.socket, why: str) -> None:
    with connection, contextlib.suppress(OSError):
        connection.send(pack(Status.REFUSED, data=why.encode()))
