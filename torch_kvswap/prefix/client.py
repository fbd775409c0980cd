"""The block manager and the pools of a prefix cache that a server keeps (docs/serve.md)."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import socket
import struct
import threading
import time
from array import array
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from torch_kvswap._native.arguments import (
    INT64_MAX,
    Int64Array,
    NotCopyable,
    kind_of,
    read_int,
    read_switch,
)
from torch_kvswap._native.loader import ForkGuard, native
from torch_kvswap._native.log import log
from torch_kvswap._native.owner import check_owner, peer_of
from torch_kvswap._native.process_lock import open_lock
from torch_kvswap.encoding.slot import EncodingName, VerifyName, read_encoding, read_verify
from torch_kvswap.host_pool.description import describe_page
from torch_kvswap.host_pool.pool import HostPool
from torch_kvswap.host_pool.shape import PoolShape
from torch_kvswap.host_pool.shared import PoolHandle
from torch_kvswap.layout import PagedLayout
from torch_kvswap.offload.groups import Groups
from torch_kvswap.offload.handler import OffloadHandler
from torch_kvswap.prefix.groups import (
    BlockGroup,
    describe_contents,
    read_groups,
    unit_tokens,
)
from torch_kvswap.prefix.hashing import Keys, read_keys, split_digests
from torch_kvswap.prefix.manager import BlockManager, BlockStats, Lookup
from torch_kvswap.prefix.protocol import (
    HEAD,
    MAGIC,
    READ_BYTES,
    VERSION,
    Op,
    Status,
    next_message,
    pack,
    pack_keys,
)

# Seconds, read at each use so that tests can set them.
DEADLINE = 1.0  # of an answer: the longest that a call waits for a server that hangs
JOINING = 10.0  # of an answer while a connection is made, which no call waits for but connect()
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0  # before a lost server is tried again

_NOTHING = Lookup(0, 0, 0)


class RemoteReservation(native.Reservation):
    """The pages of a job, as those of a BlockManager; end_reported() tells the server of its end.

    Attributes:
        key_indices (list[np.ndarray]), pages (list[np.ndarray]): of each group.
        lease (int): of _preempt().
        skipped (int): 0: a server has no store_threshold.
    """

    key_indices: list[Int64Array]
    pages: list[Int64Array]
    lease: int
    skipped = 0


class Session(NotCopyable):
    """A connection to a server, of an engine, or of its scheduler or one of its workers.

    A server that does not answer for DEADLINE, or has closed the connection, is given up. A thread
    then tries to join it again, once no job uses its pages.

    Args:
        path (str): the server's socket.
        engine (str): the name of the engine, if its scheduler and workers have sessions of their
            own.
        cache: what the server compares, from describe().
        pools (RemotePools): get the server's memory.
        worker (int): the number of this worker in its engine, from 0 on.
        workers (int): of a scheduler, how many workers its engine has; 0 for others.
    """

    def __init__(
        self,
        path: str,
        engine: str,
        cache: dict[str, object],
        pools: RemotePools,
        worker: int = 0,
        workers: int = 0,
    ) -> None:
        self._path, self._cache, self._pools = path, cache, pools
        self._names = {"engine": engine, "worker": worker, "workers": workers}
        self._process = ForkGuard()
        self._session = self._generation = 0  # 0: none
        self.resets = 0
        # Guarded by _lock; _changed is notified when the thread may have something to do.
        self._lock = threading.RLock()  # taken as such: Ctrl-C may leave a Condition locked
        self._changed = threading.Condition(self._lock)
        self._connection: socket.socket | None = None
        self._meeting: socket.socket | None = None  # on which the thread waits for the others
        self._open: set[int] = set()  # reservations; jobs use their pages
        self._unheard_resets = 0  # that the server of this generation has not answered
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="kvswap-join", daemon=True)

    def __repr__(self) -> str:
        state = "no server" if self._connection is None else "connected"
        return f"{type(self).__name__}({self._path!r}, {state})"

    def join(self) -> None:
        """Connects to the server, and attaches the pools to its memory.

        Raises:
            OSError: no server answers there.
            ValueError: the server refuses this cache, and says why.
            RuntimeError: the kernel does not map the memory.
        """
        connection, generation = connect_to(self._path)
        try:
            if generation != self._generation and self._generation:
                # First the old memory is freed: there may be no room for both.
                self._await_jobs(connection)
                self._session = self._generation = 0
                self._pools.let_go()
            hello = {**self._cache, **self._names, "session": self._session}
            message = pack(Op.HELLO, data=json.dumps(hello).encode())
            with contextlib.closing(open_lock()) as lock:
                sent = socket.send_fds(connection, [message], lock.fds)
            if sent < len(message):  # sending nothing fails if the server has closed already
                connection.sendall(message[sent:])
            session, resets = receive(connection, HEAD.size + 16)[0]
            with contextlib.ExitStack() as received:
                handles = []
                for _ in self._pools.layouts:
                    handles.append(PoolHandle.receive(connection))
                    received.callback(handles[-1].close)
                if generation != self._generation:
                    self._pools.attach(handles)
            connection.settimeout(None)
            # The kernel's own timeouts cost no system call.
            seconds = struct.pack("ll", int(DEADLINE), int(DEADLINE % 1 * 1e6))
            for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                connection.setsockopt(socket.SOL_SOCKET, option, seconds)
        except BaseException:
            self._hang_up(connection)
            raise
        with self._lock:  # no call comes in between
            self.resets = resets
            self._use(connection, session, generation)
            if self._unheard_resets:
                self._tell_reset()

    def _tell_reset(self) -> None:
        """The caller holds the lock."""
        answer = self._ask(Op.RESET)
        if answer is not None:
            self._unheard_resets, self.resets = 0, answer[0]

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
            self._thread.join(DEADLINE)  # it may read from what is closed next
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
            connection.settimeout(DEADLINE)
            connection.connect(self._path)
            _check_server(connection, self._path)
            connection.sendall(pack(Op.LEAVE, [self._session, self._generation]))

    def _hang_up(self, connection: socket.socket) -> None:
        """Closes a connection on which the thread was joining."""
        if self._is_closing:
            with contextlib.suppress(OSError):
                connection.sendall(pack(Op.LEAVE))
        connection.close()

    def _use(self, connection: socket.socket, session: int, generation: int) -> None:
        with self._lock:
            if generation != self._generation:
                self._unheard_resets = 0
            self._session, self._generation = session, generation
            if self._is_closing:
                self._hang_up(connection)
            else:
                self._connection = connection

    def _meet(self, connection: socket.socket, session: int) -> array[int]:
        """The answer when the other processes of the engine have come, for which it waits."""
        said = {**self._names, "session": session}
        with self._lock:
            if self._is_closing:
                raise ConnectionError("it is closed")
            self._meeting = connection
        try:
            connection.sendall(pack(Op.MEET, data=json.dumps(said).encode()))
            if self._thread.is_alive():  # else the engine is being started, and all are there
                connection.settimeout(None)
            return receive(connection, HEAD.size + 24)[0]  # a reset may be right behind it
        finally:
            connection.settimeout(JOINING)
            self._meeting = None

    def _await_jobs(self, connection: socket.socket) -> None:
        """Waits until no job uses the memory of an earlier server."""

    def _has_jobs(self) -> bool:
        """Whether a job uses a page."""
        return bool(self._open)

    def _until_lost(self) -> None:
        """Waits until the server is lost, and may be joined again."""
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
                log.info("the server at %s is there again", self._path)
                joined, told = time.monotonic(), ""
            except (OSError, ValueError, RuntimeError, MemoryError) as error:
                if str(error) != told and not self._is_closing:
                    told = str(error)
                    log.warning("the server at %s cannot be joined again: %s", self._path, told)
            pause = min(2 * pause, LONGEST_PAUSE)

    def _ask(
        self, op: Op, numbers: Sequence[int] = (), keys: Sequence[bytes] = ()
    ) -> array[int] | None:
        """The numbers of the server's answer; None if there is no server."""
        self._process.check("prefix cache")
        message = pack_keys(op, numbers, keys)
        with self._lock:
            return self._exchange(message, op < Op.END)

    def _exchange(self, message: bytes, has_answer: bool = True) -> array[int] | None:
        """See _ask(). The caller holds the lock."""
        if self._connection is None:
            return None
        try:
            self._connection.sendall(message)
            return receive(self._connection)[0] if has_answer else None
        except ValueError:  # the server refuses what was asked
            raise
        except BlockingIOError:
            self._lose(f"it did not answer within {DEADLINE:g} s")
            return None
        except OSError as error:
            self._lose(str(error))
            return None
        except BaseException:  # what comes next might be half an answer
            self._lose("a call was interrupted")
            raise

    def _lose(self, why: str) -> None:
        """The caller holds the lock."""
        if self._connection is None or self._is_closing:  # the thread reads until close() closes it
            return
        log.warning("the server at %s is lost, and its pages: %s", self._path, why)
        self._connection.close()
        self._connection = None
        self._changed.notify_all()

    def _job_ended(self) -> None:
        """The caller holds the lock."""
        if self._connection is None and not self._has_jobs():
            self._changed.notify_all()


class RemoteManager(Session):
    """The BlockManager of a server, with the same calls; other engines change it too.

    A call asks the server, and waits DEADLINE for it at most. Without a server lookups find
    nothing, and loads and stores get no pages. Reservations end here when the server is lost.

    Any thread may call any method. In a forked child every call raises RuntimeError.

    Args:
        groups (int | Sequence[BlockGroup]): as for a BlockManager; with a number, the server says
            how many pages there are.
        others: see Session.

    Attributes:
        groups, unit_tokens: see BlockManager.
        resets (int): another number after each reset by any engine, and for each server, as far as
            lookup() has heard.
    """

    def __init__(
        self,
        path: str,
        groups: int | Sequence[BlockGroup],
        cache: dict[str, object],
        pools: RemotePools,
    ) -> None:
        super().__init__(path, "", cache, pools)
        self.groups = read_groups(groups)
        self.unit_tokens = unit_tokens(self.groups)
        self._is_list = not isinstance(groups, int)
        of_one_page = [dataclasses.replace(group, num_pages=1) for group in self.groups]
        # For what depends on the groups only: it never has a block.
        self._of_one_page = BlockManager(of_one_page)
        self._dropped = 0  # stores without a server
        self._ended = native.EndedPages()
        self._reported: list[tuple[int, bool, list[int], bool]] = []  # taken from there
        # Of open reservations: the digests of each group, and the indices of those with a page.
        self._reserved: dict[int, tuple[list[bytes], list[Int64Array]]] = {}

    def lookup(self, keys: Keys | Sequence[Keys], *, again: bool = False) -> Lookup:
        """See BlockManager.lookup()."""
        answer = self._ask(Op.LOOKUP, [read_switch("again", again)], self._read(keys))
        if answer is None:
            return _NOTHING
        *found, self.resets = answer
        return Lookup(*found)

    def needed_blocks(self, prefix: int) -> range | list[range]:
        """See BlockManager.needed_blocks()."""
        needed = self._needed_blocks(prefix)
        return needed if self._is_list else needed[0]

    # What a PrefixCache calls, with the digests of each group. It gets lists with an item for each.

    def _needed_blocks(self, prefix: int) -> list[range]:
        """See BlockManager.needed_blocks()."""
        return self._of_one_page._needed_blocks(prefix)

    def _prepare_load(self, digests: list[bytes], prefix: int | None) -> RemoteReservation | None:
        """See BlockManager.prepare_load()."""
        number = -1 if prefix is None else read_int("prefix", prefix, 0, INT64_MAX)
        return self._reserve(Op.PREPARE_LOAD, digests, [number])

    def _prepare_store(self, digests: list[bytes], resets: int | None) -> RemoteReservation | None:
        """See BlockManager.prepare_store()."""
        return self._reserve(Op.PREPARE_STORE, digests, [-1 if resets is None else resets])

    def _preempt(self, digests: list[bytes]) -> RemoteReservation | None:
        """See BlockManager.preempt()."""
        return self._reserve(Op.PREEMPT, digests)

    def is_pending(self, digests: list[bytes]) -> bool:
        """See BlockManager.is_pending()."""
        return self._ask(Op.IS_PENDING, keys=digests) == array("q", [True])

    # What anybody may call.

    def touch(self, keys: Keys | Sequence[Keys]) -> None:
        """See BlockManager.touch()."""
        self._ask(Op.TOUCH, keys=self._read(keys))

    def order(self, keys: Keys | Sequence[Keys], *, renew: bool = False) -> None:
        """See BlockManager.order()."""
        self._ask(Op.ORDER, [read_switch("renew", renew)], self._read(keys))

    def release(self, lease: int) -> bool:
        """See BlockManager.release()."""
        return self._ask(Op.RELEASE, [read_int("lease", lease)]) == array("q", [True])

    def reset(self) -> None:
        """Forgets all blocks and leases, also those of other engines: see BlockManager.reset().

        If the server does not answer, it forgets them when it is joined again.
        """
        with self._lock:
            self._unheard_resets = 1
            self._tell_reset()

    def stats(self, group: int = 0) -> BlockStats:
        """The server's statistics of a group, of all engines; zeros without a server.

        `refused` also counts the stores of this engine that found no server.
        """
        group = read_int("group", group, 0, len(self.groups) - 1)
        answer = self._ask(Op.STATS, [group])
        fields = len(dataclasses.fields(BlockStats))
        stats = BlockStats(*([0] * fields if answer is None else answer))
        return dataclasses.replace(stats, refused=stats.refused + self._dropped)

    def grow(self, num_ready_pages: int | Sequence[int] | None = None) -> None:
        """Does nothing: all pages are ready before the server is joined."""

    # Reservations.

    def end_reported(self) -> None:
        """Tells the server which copies have ended."""
        self._process.check("prefix cache")
        with self._lock:
            self._ended.take(self._reported)
            while self._reported:  # each goes when it was told: the server may hear it twice
                number, has_succeeded, rejected, is_corrupted = self._reported[0]
                if is_corrupted:  # what is below may be as wrong
                    groups, keys = _keys_of(rejected, *self._reserved[number])
                    self._exchange(pack_keys(Op.DELETE, groups, keys), False)
                self._exchange(pack(Op.END, [number, has_succeeded, *rejected]), False)
                self._open.discard(number)
                self._reported.pop(0)
                self._reserved.pop(number, None)
            self._job_ended()

    def _ask(
        self, op: Op, numbers: Sequence[int] = (), keys: Sequence[bytes] = ()
    ) -> array[int] | None:
        """See Session. What has ended is told first."""
        self.end_reported()
        return super()._ask(op, numbers, keys)

    def _reserve(
        self, op: Op, digests: list[bytes], numbers: Sequence[int] = ()
    ) -> RemoteReservation | None:
        """As _ask(). What the answer reserves is open from then on."""
        number = 0
        with self._lock:
            self.end_reported()
            try:
                answer = self._exchange(pack_keys(op, numbers, digests))
                if answer is None:
                    self._dropped += op != Op.PREPARE_LOAD
                if not answer:
                    return None
                number, lease, *counts = answer[: 2 + len(self.groups)]
                ends = list(accumulate(2 * counts, initial=2 + len(counts)))
                parts = [np.asarray(answer[start:end]) for start, end in pairwise(ends)]
                of = RemoteReservation(number, self._ended, sum(counts), op == Op.PREPARE_LOAD)
                of.key_indices, of.pages = parts[: len(counts)], parts[len(counts) :]
                of.lease = lease
                if number:
                    self._reserved[number] = digests, of.key_indices
                    self._open.add(number)
            except ValueError:  # the server refuses what was asked
                raise
            except BaseException:  # nobody would end what the server has reserved
                self._open.discard(number)
                self._lose("a call was interrupted")
                raise
        return of

    def _read(self, keys: Keys | Sequence[Keys]) -> list[bytes]:
        return read_keys(keys, len(self.groups), self._is_list)


def _keys_of(
    positions: Sequence[int], digests: Sequence[bytes], indices: Sequence[Int64Array]
) -> tuple[list[int], list[bytes]]:
    """The groups and keys of the pages with these positions among those of all groups in a row."""
    several = zip(map(split_digests, digests), indices, strict=True)
    of_pages = [
        (group, keys[index]) for group, (keys, of_group) in enumerate(several) for index in of_group
    ]
    return [of_pages[at][0] for at in positions], [of_pages[at][1] for at in positions]


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


def read_model(
    model: object, rank: object, world: object, prefix: str = ""
) -> tuple[str, int, int]:
    """Checks of which part of which model others get the pages; errors name the arguments so."""
    if not isinstance(model, str):
        raise TypeError(
            f"{prefix}model is {kind_of(model)}; name the model and its revision, because others "
            "may use the same pages"
        )
    parts = read_int(f"{prefix}world", world, 1)
    return model, read_int(f"{prefix}rank", rank, 0, parts - 1), parts


def describe(
    layouts: Sequence[PagedLayout],
    groups: Sequence[BlockGroup] | None,
    model: str,
    rank: int,
    world: int,
    blocks_per_page: int,
    encoding: EncodingName,
    bits_per_value: float | None,
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
    part_of = read_model(model, rank, world)
    contents = describe_contents(groups or [BlockGroup(1)], *part_of, bytes_of)
    kept, part = read_encoding(encoding, bits_per_value), (0, parts) if parts > 1 else None
    pages = []
    for layout, of_group in zip(layouts, contents, strict=True):
        verify = read_verify(verify, layout.device)
        shape = PoolShape(layout, 1, blocks_per_page, kept, verify, part)
        pages.append(describe_page(layout._describe(), shape, kept, of_group))
    return {
        "pages": pages,
        "num_pages": [0] if groups is None else [group.num_pages for group in groups],
        "verify": verify,
    }


def connect_to(path: str) -> tuple[socket.socket, int]:
    """A connection to the server, and its generation: another one has other memory.

    Raises OSError if there is none or it is another user's, and ValueError if it refuses.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(JOINING)
        with _needs_server(path):
            connection.connect(path)
        _check_server(connection, path)
        with _needs_server(path):
            numbers, magic = receive(connection)
        if magic != MAGIC or len(numbers) != 2:
            raise ConnectionError(f"what answers at {path} is no server of this library")
        version, generation = numbers
        if version != VERSION:
            raise ConnectionError(
                f"the server at {path} has version {version} of the protocol, this library "
                f"{VERSION}; use the same release for both"
            )
    except BaseException:
        connection.close()
        raise
    return connection, generation


@contextlib.contextmanager
def _needs_server(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConnectionError(
            f"no server answers at {path}: {error}; start one with "
            f"`python -m torch_kvswap serve --socket {path} --memory ...`"
        ) from error


def _check_server(connection: socket.socket, path: str) -> None:
    check_owner(f"the server at {path}", peer_of(connection)[1])


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
