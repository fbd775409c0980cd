"""One index of host pages for the engines of a machine (docs/serve.md)."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from array import array
from collections.abc import Callable, Hashable, Iterable, Sequence
from enum import IntEnum
from functools import partial
from typing import Any

import numpy as np

from torch_kvswap._C import Reservation
from torch_kvswap._native.arguments import bytes_text, read_int
from torch_kvswap._native.log import log
from torch_kvswap._native.process_lock import is_free
from torch_kvswap.below.format import PageFormat, load_checksum
from torch_kvswap.below.read_store import read_store, without_store
from torch_kvswap.below.store import PageStore
from torch_kvswap.host_pool.description import difference
from torch_kvswap.host_pool.pool import HostPool
from torch_kvswap.host_pool.system import NoRoomError, check_room
from torch_kvswap.layout import layout_like
from torch_kvswap.prefix.block_groups import BlockGroup
from torch_kvswap.prefix.hashing import KEY_BYTES
from torch_kvswap.prefix.manager import BelowPolicy, BlockManager, Lookup
from torch_kvswap.prefix.peers import EventLoop, Listener, Peer
from torch_kvswap.prefix.protocol import (
    MAGIC,
    VERSION,
    KeyState,
    Op,
    Outcome,
    ProtocolError,
    Status,
    pack,
    unpack_keys,
)
from torch_kvswap.prefix.tier import Tier

DEADLINE = 1.0  # seconds that an engine waits for an answer, unless a server has others
QUARANTINE = 5.0  # seconds before pages that a dead engine was writing are reused
_LEAST_DEADLINE, _MOST_DEADLINE = 0.001, 3600.0
_TIER_SECONDS = 1.0  # between checks for calls of the tier that have timed out
_MAX_LENT_SHARE = 1 / 4  # of the pages that may be lent, divided among the borrowers
_NO_PAGES = np.empty(0, np.int64)


class Stage(IntEnum):
    """How far a session has come. An engine in one process and a scheduler become members, a worker
    ready. A worker that has lost another server says MEET first, and so waits for its scheduler.
    """

    CAME = 0  # it has to say who it is
    WAITS = 1  # it has said MEET, and has no answer yet
    MEMBER = 2  # its cache fits to the pages; of a scheduler, all its workers are ready
    READY = 3  # a worker that has pinned the memory


class _Session(Peer):
    """An engine, or its scheduler or one of its workers if these are processes of their own. It
    outlives its connection while it has pages and its process lives, or one that was forked from
    it. What a scheduler has reserved its workers copy: when it has ended, it is theirs.

    Attributes:
        number (int): names it when it connects again; no other server has it.
        engine (str): its name, if scheduler and workers are sessions of their own.
        worker (int): its number among the workers.
        workers (int): of a scheduler: how many its engine has.
        held (dict[Hashable, Reservation]): by the engine's numbers; see take_over().
        lent (set[int]): pages that it has borrowed.
    """

    def __init__(self, server: PageServer, *of: Any) -> None:
        super().__init__(server._loop, *of)
        self._server, self.number = server, secrets.randbits(62) + 1
        self.engine, self.worker, self.workers = "", 0, 0
        self.stage = Stage.CAME
        self.held: dict[Hashable, Reservation] = {}
        self.lent: set[int] = set()

    def take(self, kind: int, numbers: array[int], data: bytes) -> None:
        self._server._handle(self, kind, numbers, data)

    def lost(self) -> None:
        """What the engine has reserved stays its own while its process lives."""
        if not self.has_pages and not (self.is_member and self.is_worker):
            self._server._end_session(self)

    def ended(self) -> None:
        self._server._end_session(self)

    def take_over(self, other: _Session) -> None:
        """Has what another session of the engine has reserved."""
        self.held |= {(other.number, number): held for number, held in other.held.items()}
        self.lent |= other.lent
        other.held, other.lent = {}, set()

    def answer(self, numbers: Iterable[int] = ()) -> None:
        self.send(pack(Status.DONE, numbers))

    def refuse(self, error: ValueError) -> None:
        self.send(pack(Status.REFUSED, data=str(error).encode()))

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
    def has_pages(self) -> bool:
        return bool(self.held or self.lent)


class _Pages:
    """The memory, the block manager and the tier, made for the first engine to connect.

    Args:
        cache: what an engine says of its cache; see remote_pools.describe().
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
        makes: list[Callable[[], HostPool]] = []
        groups, sizes, left = [], [], memory
        for page, wanted in zip(cache["pages"], cache["num_pages"], strict=True):
            layout = layout_like(page["tensors"])
            options = {"encoding": page["encoding"], "verify": cache["verify"]}
            if page["parts"]:
                options["part"] = 0, page["parts"]
            per_page = page["blocks_per_page"]
            size = HostPool.page_bytes_of(layout, per_page, **options)
            count = wanted or memory // size
            if count * size > left or not count:
                raise ValueError(
                    f"{max(count, 1)} pages of {size} bytes do not fit into the "
                    f"{bytes_text(left)} that this server has left for them; start it with more "
                    "--memory"
                )
            sizes.append(size)
            left -= count * size
            makes.append(partial(HostPool, layout, count, per_page, **options, shared=True))
            fields = {name: page[name] for name in ("block_tokens", "window_tokens", "is_state")}
            groups.append(BlockGroup(count, **fields))
        try:
            check_room(memory - left, sum(sizes))  # all groups: engines touch them later
            self.pools = [make() for make in makes]
        except NoRoomError as error:
            if any(cache["num_pages"]):  # the engine can ask for fewer
                raise ValueError(
                    f"{error.problem}; ask for fewer pages, or {error.otherwise}"
                ) from error
            raise _too_much(memory, error) from error
        below = None if store is None else below_policy
        self.manager = BlockManager(groups, below_policy=below, may_be_dropped=True)
        self.tier: Tier | None = None
        if store is not None:
            formats = list(map(PageFormat, self.pools, cache["pages"]))
            self.tier = Tier(
                store,
                formats,
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
        self._sessions: dict[int, _Session] = {}
        self._made: _Pages | None = None
        self._some_ended = False
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
            self._loop = EventLoop()
            self._listener = Listener(path, self._loop, self._admit)
            undo.pop_all()

    def run(self) -> None:
        """Serves until stop() is called, then closes everything. Engines go on without pages."""
        try:
            self._loop.run(self._poll)
        finally:
            self._close()

    def stop(self) -> None:
        """Ends run(). Any thread may call, and a signal handler."""
        self._loop.stop()

    def _poll(self) -> None:
        if self._tier is not None:
            self._tier.poll(some_ended=self._some_ended)
            self._some_ended = False

    def _wake_for_tier(self) -> None:
        """Lets _poll() find calls of the tier that have timed out."""
        self._loop.later(_TIER_SECONDS, self._wake_for_tier)

    def _close(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)
        for session in list(self._sessions.values()):
            self._end_session(session)
        if (store := self._tier or self._store) is not None:
            store.close()
        self._loop.close()
        self._listener.close()

    # Sessions.

    def _admit(self, *of: Any) -> None:
        session = _Session(self, *of)
        self._sessions[session.number] = session
        greeting = VERSION, self._generation, session.number, int(self._deadline * 1e6)
        session.send(pack(Status.DONE, greeting, MAGIC))
        session.expect()

    def _handle(self, session: _Session, op: int, numbers: array[int], data: bytes) -> None:
        # A member has said HELLO or MEET, once. LEAVE may come first: for a session that is lost.
        is_in_turn = op == Op.LEAVE or session.is_member != (op in (Op.HELLO, Op.MEET))
        if op not in self._handlers or not is_in_turn:
            raise ProtocolError(f"{op} is no request{'' if session.is_member else ' before HELLO'}")
        try:
            self._handlers[op](session, numbers, data)
        except ValueError as error:
            if not session.is_member:
                session.refuse(error)
            raise

    def _end_session(self, session: _Session) -> None:
        """No copy of this process uses a page any more: it has ended, or it says so. A worker of
        its engine may still copy what it has reserved.
        """
        if session.number not in self._sessions:
            return
        for other in self._of_engine(session):
            if other.is_worker and other.is_member:
                other.take_over(session)
        self._drop(session)

    def _of_engine(self, session: _Session) -> list[_Session]:
        """The other sessions of the same engine."""
        every = self._sessions.values()
        same = [other for other in every if session.engine and other.engine == session.engine]
        return [other for other in same if other is not session]

    def _drop(self, session: _Session) -> None:
        """Frees what an engine has reserved, and forgets it. What an engine that has not said that
        its copies have ended may have been writing is freed later.
        """
        del self._sessions[session.number]
        session.drop()

        def free() -> None:
            for held in session.held.values():
                held.let_go()
            if session.lent:
                self._manager._take_back(list(session.lent))
            self._some_ended = True

        writes = session.lent or any(held.fills for held in session.held.values())
        if writes and (session.is_dead or session.is_worker):  # which has them from a scheduler
            self._loop.later(QUARANTINE, free)
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
    def _tier(self) -> Tier | None:
        return None if self._made is None else self._made.tier

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
                    cache, self._memory, self._store, self._below_policy, self._loop.wake
                )
            except (OSError, ImportError, RuntimeError) as error:
                raise ValueError(str(error)) from error
            if self._tier is not None:
                self._wake_for_tier()
        different = difference(cache, self._pages.cache, ("here", f"at {self._path}"))
        if different is not None:
            raise ValueError(
                f"the server has other pages: {different}; start a server of its own for this cache"
            )
        assert session.connection is not None
        session.stage = Stage.MEMBER
        session.recognize()
        session.answer([self._index, self._pages.pools[0].num_pages])
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
            if session.is_worker:
                session.take_over(earlier)
            self._drop(earlier)
        for other in self._of_engine(session):
            is_same = other.worker == session.worker and other.is_worker == session.is_worker
            if is_same and other.is_member:
                raise ValueError(
                    f"another engine, process {other.pid}, has the name {session.engine!r} at "
                    f"{self._path}; give each engine its own engine_id"
                )

    def _on_meet(self, session: _Session, _: array[int], data: bytes) -> None:
        self._enter(session, json.loads(data))
        session.stage = Stage.WAITS
        session.recognize()
        self._introduce(session)

    def _on_ready(self, session: _Session, *_: object) -> None:
        session.stage = Stage.READY
        self._introduce(session)

    def _introduce(self, session: _Session) -> None:
        """Answers the processes of this engine that wait for others: the scheduler for all workers
        to be ready, and these for the scheduler.
        """
        every = [session, *self._of_engine(session)]
        ready = sum(one.stage == Stage.READY for one in every)
        has_scheduler = any(one.is_scheduler for one in every)
        for one in every:
            is_met = ready == one.workers if one.is_scheduler else has_scheduler
            if one.stage == Stage.WAITS and is_met:
                pages = 0 if self._made is None else self._made.pools[0].num_pages
                one.stage = Stage.MEMBER if one.is_scheduler else Stage.CAME
                one.answer([self._index, pages])
                if not one.is_member:
                    one.expect()

    def _lookup(self, keys: list[bytes], again: bool, hold: bool = False) -> Lookup:
        """Also asks the second tier."""
        found = self._manager.lookup(keys, again=again, hold=hold)
        return found if self._tier is None else self._tier.ask(found, keys)

    def _on_lookup(self, session: _Session, numbers: array[int], data: bytes) -> None:
        again, number, *counts = numbers.tolist()
        found = self._lookup(self._keys(counts, data), again=bool(again), hold=bool(number))
        if found.lease is not None:
            self._keep(session, number, found.lease)
        session.answer(found[:4])

    def _on_load(self, session: _Session, numbers: array[int], data: bytes) -> None:
        number, *counts = numbers.tolist()
        keys = self._keys(counts, data)
        held = self._manager.prepare_load(keys)
        if held is None:
            return session.answer()
        self._keep(session, number, held)
        session.answer(_page_of_each(keys, held))

    def _on_hold(self, session: _Session, numbers: array[int], data: bytes) -> None:
        number, *counts = numbers.tolist()
        keys = self._keys(counts, data)
        if len(keys) > 1:
            raise ProtocolError("it holds keys one by one of a cache with several groups")
        held = self._manager._hold(keys)
        if held is not None:
            self._keep(session, number, held)
        answer = _page_of_each(keys, held)
        states = np.frombuffer(answer, np.int64)  # the same memory
        if (states < 0).any():
            # Keys that the lookup has found are being stored, the tier is asked for those behind.
            found = self._lookup(keys, again=True)
            arriving = states[: found.found + found.asking]
            arriving[arriving < 0] = KeyState.ARRIVES
        session.answer(answer)

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
        held = session.held.get(number)
        if held is None:  # nothing was reserved, or by another server
            return
        if outcome == Outcome.LOST:
            log.warning(
                "process %d has lost a GPU and may still write %d pages: nobody gets them until it "
                "has closed its prefix cache or has ended",
                *(session.pid, sum(map(len, held.pages))),
            )
            self._manager._abandon(held)
        else:
            session.held.pop(number)._end(outcome, rejected)
        self._some_ended = True

    def _on_borrow(self, session: _Session, numbers: array[int], _: bytes) -> None:
        (most,) = numbers
        lent_to = sum(bool(one.lent) for one in self._sessions.values() if one is not session)
        share = max(int(self._pages.pools[0].num_pages * _MAX_LENT_SHARE / (lent_to + 1)), 1)
        pages = self._manager._lend(max(min(most, share - len(session.lent)), 0)).tolist()
        session.lent.update(pages)
        session.answer(pages)

    def _on_reserve(self, session: _Session, numbers: array[int], data: bytes) -> None:
        number, lease, *counts = numbers.tolist()
        of_groups = self._keys(counts, data)
        try:
            store = self._manager.prepare_store(of_groups, hold=bool(lease))
        except ValueError as error:  # a key occurs twice
            return session.refuse(error)
        if store is None:
            return session.answer()
        if store.id:
            self._keep(session, number, store)
        if store.lease is not None:
            self._keep(session, lease, store.lease)
        lent = sum(map(len, store.pages))
        session.answer(array("q", [lent]) + _page_of_each(of_groups, store))

    def _on_give_back(self, session: _Session, numbers: array[int], data: bytes) -> None:
        resets, *pages = numbers.tolist()
        if not session.lent.issuperset(pages) or len({*pages}) < len(pages):
            raise ProtocolError("it names a page that it has not borrowed, or one twice")
        self._manager._take_back(pages, data if resets == self._index else b"")
        session.lent.difference_update(pages)
        self._some_ended = True

    def _on_touch(self, _: _Session, numbers: array[int], data: bytes) -> None:
        self._manager.touch(self._keys(numbers.tolist(), data))

    def _on_order(self, _: _Session, numbers: array[int], data: bytes) -> None:
        renew, *counts = numbers.tolist()
        self._manager.order(self._keys(counts, data), renew=bool(renew))

    def _on_stats(self, session: _Session, numbers: array[int], _: bytes) -> None:
        session.answer(self._manager._stats(numbers[0]))

    def _on_reset(self, session: _Session, *_: object) -> None:
        self._manager.reset()
        session.answer()
        for other in self._sessions.values():
            is_told = other.is_member and not other.is_worker and other.connection is not None
            if is_told and other is not session:
                other.send(pack(Status.RESET))

    def _on_leave(self, session: _Session, numbers: array[int], _: bytes) -> None:
        """Ends a session, or one of the same process that has lost its connection."""
        for number in (*numbers, session.number):
            ended = self._sessions.get(number)
            if ended is not None and ended.pid == session.pid:
                self._end_session(ended)


def _page_of_each(keys: list[bytes], reserved: Reservation | None) -> array[int]:
    """For each key of all groups the page that is reserved for it, or KeyState.ABSENT."""
    answer = array("q")
    for group, of_group in enumerate(keys):
        pages = _NO_PAGES if reserved is None else reserved.pages[group]
        if len(pages) * KEY_BYTES < len(of_group):
            of_each = np.full(len(of_group) // KEY_BYTES, KeyState.ABSENT, np.int64)
            if reserved is not None:
                of_each[reserved.key_indices[group]] = pages
            pages = of_each
        answer.frombytes(pages.tobytes())
    return answer
