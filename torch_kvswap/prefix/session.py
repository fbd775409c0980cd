"""A connection to a server of host pages (docs/serve.md)."""

from __future__ import annotations

import contextlib
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
from itertools import count
from typing import Any

from torch_kvswap._native import rendezvous
from torch_kvswap._native.arguments import NotCopyable
from torch_kvswap._native.loader import ForkGuard, native
from torch_kvswap._native.log import log
from torch_kvswap._native.process_lock import open_lock
from torch_kvswap.host_pool.shared import PoolHandle
from torch_kvswap.prefix.protocol import (
    HEAD,
    JOINING,
    MAGIC,
    READ_BYTES,
    VERSION,
    Op,
    Outcome,
    Status,
    next_message,
    pack,
)
from torch_kvswap.prefix.remote_pools import RemotePools

# Seconds, read at each use so that tests can set them.
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0  # before a lost server is tried again
LOOK_PAUSE = 0.05  # between looks for what has ended; an engine without requests makes no calls

_JOINED_BYTES = HEAD.size + 16  # of the answer to HELLO and MEET


class RemoteReservation(native.Reservation):
    """Pages that a server holds for this engine. Session.send() tells it of their end.

    Attributes:
        pages (list[np.ndarray]), key_indices (list[np.ndarray]): of each group; indices of a store.
        lease (RemoteReservation | None): of a store with hold=True.
        answers (list[int]): of a scheduler: the page of each key, or its KeyState.
    """

    key_indices: Any = ()
    pages: Any = ()
    lease: RemoteReservation | None = None
    answers: list[int]


class Session(NotCopyable):
    """A connection to a server, of an engine, or of its scheduler or one of its workers.

    send() sends a request and returns. Answers come in the order of the requests: poll() takes
    those that have come, and ask() waits for its own. A server that has closed the connection, or
    has neither answered nor taken anything within its deadline, is given up by the next poll() or
    ask(). A thread then tries to join it again, once no job uses its pages. A worker keeps the old
    memory until its scheduler has come to the next server: then no job uses it any more, and none
    will. The thread also polls, and tells the server which jobs have ended, because an engine
    without requests makes no calls.

    Any thread may call any method. In a forked child every call but close() raises RuntimeError.

    Args:
        path (str): the server's socket.
        cache: what the server compares, from describe(); a scheduler has none.
        pools (RemotePools | None): get the server's memory; None for a scheduler, which maps none.
        engine (str): the name of the engine, if its scheduler and workers have sessions of their
            own.
        worker (int): the number of this worker in its engine, from 0 on.
        workers (int): of a scheduler, how many workers its engine has; 0 for others.

    Attributes:
        lock (RLock): held in each call.
        num_pages (int): pages of the server's first group.
        resets (int): another number after each reset of the index, by any engine, as far as the
            server has said so, and for each server; 0 without one.
    """

    def __init__(
        self,
        path: str,
        cache: Mapping[str, object],
        pools: RemotePools | None,
        engine: str = "",
        worker: int = 0,
        workers: int = 0,
    ) -> None:
        self.num_pages = 0
        self._pools = pools
        self._path = path
        self._says = {**cache, "engine": engine, "worker": worker, "workers": workers}
        self._is_worker = bool(engine) and pools is not None
        self._process = ForkGuard()
        self._session = 0  # what a server calls it that may have it
        self._generation = 0  # of the server whose memory is attached, or whose index is used
        self._deadline = JOINING  # seconds for an answer; as the server says it
        self.resets = 0
        self._numbers = count(1)  # of reservations
        # Reservations of jobs that may use their pages. Guarded by the lock, as are the others.
        self._jobs: set[int] = set()
        self._ended = native.EndedPages()
        self._reported: list[tuple[int, int, list[int]]] = []  # taken from there
        # _changed is notified when the thread may have something to do.
        self.lock = threading.RLock()  # taken as such: Ctrl-C may leave a Condition locked
        self._changed = threading.Condition(self.lock)
        self._connection: socket.socket | None = None
        self._meeting: socket.socket | None = None  # on which the thread waits for the others
        # Whether this engine knows of a reset, and of one that no server has heard of.
        self._knows_reset = self._must_tell_reset = False
        self._is_closing = False
        self._forget()
        self._thread = threading.Thread(target=self._run, name="kvswap-join", daemon=True)

    def _forget(self) -> None:
        """Begins a connection, or ends one: nothing is sent and nothing asked."""
        self._inbox = bytearray()
        self._outbox: list[bytes] = []  # what the server has not taken
        self._awaited: deque[Callable[[array[int]], object]] = deque()  # get the answers
        self._failure = ""  # of the connection, which the next poll() or ask() gives up
        self._moved = 0.0  # when the server has last answered, or taken some of the outbox

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
        connection, generation, number, self._deadline = connect_to(self._path)
        try:
            if self._pools is None:
                answer = self._meet(connection, number)
            else:
                if generation != self._generation and self._generation:
                    if self._is_worker:
                        self._meet(connection, number)
                    # First the old memory is freed: there may be no room for both.
                    self._generation = 0
                    self._pools.let_go()
                answer = self._attach(connection, number, generation, self._pools)
            connection.settimeout(None)
            # The kernel's own timeouts cost no system call.
            seconds = struct.pack("ll", int(self._deadline), int(self._deadline % 1 * 1e6))
            for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                connection.setsockopt(socket.SOL_SOCKET, option, seconds)
            if self._is_worker:
                connection.sendall(pack(Op.READY))
        except BaseException:
            connection.close()
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
        self.end_jobs()
        with self.lock:
            self._is_closing = True
            self.send(pack(Op.LEAVE))
            was_told = self.is_joined and not (self._outbox or self._failure)
            left, self._connection = self._connection, None
            if self._meeting is not None:  # wakes the thread
                with contextlib.suppress(OSError):
                    self._meeting.shutdown(socket.SHUT_RDWR)
            self._changed.notify_all()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(self._deadline)  # it may be attaching pools, which are closed next
        if left is not None:
            left.close()
        if not was_told and self._session:
            self._leave_anew()

    def _leave_anew(self) -> None:
        """Ends the session on another connection: a server that has closed its own, or has taken
        nothing for long, would keep the pages until this process ends. Waits for no answer."""
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(self._deadline)
            connection.connect(self._path)
            rendezvous.check_peer(connection, f"the server at {self._path}")
            connection.sendall(pack(Op.LEAVE, [self._session]))

    def _introduce(self, connection: socket.socket, number: int, how: Op) -> Sequence[int]:
        """Says who it is, and returns the answer. From now on the server may have this session, and
        none from before.
        """
        text = json.dumps({**self._says, "session": self._session})
        with contextlib.closing(open_lock()) as lock:
            fds = lock.fds if how == Op.HELLO else ()
            rendezvous.send(connection, pack(how, data=text.encode()), fds)
        self._session = number
        # A handle or a reset may be right behind it.
        return receive(connection, bytearray(), _JOINED_BYTES)[1]

    def _attach(
        self, connection: socket.socket, number: int, generation: int, pools: RemotePools
    ) -> Sequence[int]:
        """Attaches the pools, if it is the memory of another server."""
        answer = self._introduce(connection, number, Op.HELLO)
        with contextlib.ExitStack() as received:
            handles = []
            for _ in pools.layouts:
                handles.append(PoolHandle.receive(connection))
                received.callback(handles[-1].close)
            if generation != self._generation:
                pools.attach(handles)
        return answer

    def _meet(self, connection: socket.socket, number: int) -> Sequence[int]:
        """The answer when the other processes of the engine have come, for which it waits."""
        with self.lock:
            if self._is_closing:
                raise ConnectionError("it is closed")
            self._meeting = connection
        try:
            if self._thread.is_alive():  # else the engine is being started, and all are there
                connection.settimeout(None)
            return self._introduce(connection, number, Op.MEET)
        finally:
            connection.settimeout(JOINING)
            self._meeting = None

    def _use(self, connection: socket.socket, generation: int, resets: int, num_pages: int) -> None:
        with self.lock:  # no call comes in between
            # Our reset is repeated if no server has confirmed it, or if this one was never reset:
            # its second tier may have pages from before the resets that we know of.
            was_reset = resets != generation
            must_reset = self._must_tell_reset or (self._knows_reset and not was_reset)
            self._knows_reset |= was_reset and not self._is_worker
            self._generation, self.resets, self.num_pages = generation, resets, num_pages
            if self._is_closing:
                return connection.close()
            self._forget()
            self._connection = connection
            if must_reset:
                self.reset()

    def _has_jobs(self) -> bool:
        """Whether a job uses a page. A worker leaves that to its scheduler, which it meets."""
        return bool(self._jobs)

    def _until_lost(self) -> None:
        """Waits until the server is lost, and may be joined again. Meanwhile tells it what has
        ended: other engines wait for that, and this one may make no more calls.
        """
        # A scheduler gets its answers in its own thread, and its workers know of their jobs.
        pause = None if self._pools is None else LOOK_PAUSE
        while True:
            with self.lock:
                if self._changed.wait_for(self._may_join, pause):
                    return
            with contextlib.suppress(MemoryError):  # there may be more the next time
                self.end_jobs()
                self.poll()

    def _may_join(self) -> bool:
        return self._is_closing or (self._connection is None and not self._has_jobs())

    def end_jobs(self) -> None:
        """Lets the next request say which jobs have ended, also without a poll() of the engine."""
        if self._pools is not None and self._pools.handler is not None:
            self._pools.handler._native.end_reservations()

    def _run(self) -> None:
        """The thread: joins the server again each time that it is lost."""
        pause, told = FIRST_PAUSE, ""
        joined: float | None = None  # when the connection began, if there was one
        while True:
            self._until_lost()
            if joined is not None and time.monotonic() - joined >= LONGEST_PAUSE:
                pause = FIRST_PAUSE
            joined = None
            with self.lock:
                if self._changed.wait_for(lambda: self._is_closing, pause):
                    return
            # Also after a join: each maps memory, and a server may end again and again.
            pause = min(2 * pause, LONGEST_PAUSE)
            try:
                self.join()
                log.info("the server at %s is back", self._path)
                joined, told = time.monotonic(), ""
            except (OSError, ValueError, RuntimeError, MemoryError) as error:
                if str(error) != told and not self._is_closing:
                    told = str(error)
                    log.warning("the server at %s cannot be joined again: %s", self._path, told)

    # Requests.

    @property
    def is_joined(self) -> bool:
        """Whether there is a server, as far as poll() and ask() know."""
        return self._connection is not None

    @property
    def is_asking(self) -> bool:
        """Whether answers have not come."""
        return bool(self._awaited)

    def send(self, message: bytes = b"", *then: Callable[[array[int]], object]) -> None:
        """Says what has ended, and sends a request, if there is a server. Does not wait.

        Args:
            message (bytes): the request. What the server does not take now, poll() and ask() send.
            then: gets the answer, if the request has one.
        """
        self._process.check("prefix cache")  # in a forked child the lock may be locked for ever
        with self.lock:
            try:
                self._ended.take(self._reported)
                ended = b""
                for number, outcome, rejected in self._reported:
                    if outcome != Outcome.LOST:  # else the pages are in use: it joins no more
                        self._jobs.discard(number)
                    ended += pack(Op.END, (number, outcome, *rejected))
                self._reported.clear()
                message = ended + message
                if self._connection is None:
                    return self._job_ended()
                if self._failure or not message:
                    return
                if not (self._awaited or self._outbox):
                    self._moved = time.monotonic()
                self._awaited += then
                if self._outbox:
                    self._outbox.append(message)
                elif (sent := self._connection.send(message, socket.MSG_DONTWAIT)) < len(message):
                    self._outbox.append(message[sent:])
            except BlockingIOError:
                self._outbox.append(message)
            except OSError as error:  # a scheduler's step goes on with the pages that it has
                self._failure = str(error)
            except BaseException:  # what has ended, or half a message, may not be said
                self._failure = "a call was interrupted"
                raise

    def ask(self, message: bytes) -> array[int] | None:
        """The answer to a request, for which it waits. None if there is no server.

        Raises ValueError if the server refuses it.
        """
        answers: list[array[int]] = []
        self._exchange(0, message, answers.append)
        return answers[0] if answers else None

    def wait(self, message: bytes = b"") -> None:
        """Sends a request, and waits until the server has taken and answered all."""
        self._exchange(0, message)

    def poll(self) -> None:
        """Takes the answers that have come."""
        self._exchange(socket.MSG_DONTWAIT)

    def reset(self) -> None:
        """Forgets all blocks, also those of other engines.

        If the server does not answer, it forgets them when it is joined again.
        """
        self._process.check("prefix cache")
        with self.lock:
            self._knows_reset = self._must_tell_reset = True
            if self._connection is not None:
                self.resets += 1
                self.send(pack(Op.RESET), self._heard_reset)

    def _heard_reset(self, _: array[int]) -> None:
        if self._heard_reset not in self._awaited:
            self._must_tell_reset = False

    # Reservations.

    def reserve(self, is_load: bool, is_lease: bool = False) -> RemoteReservation:
        """Made before the server is asked: if the caller raises then, or the server reserves
        nothing for it, it ends as any other.
        """
        self._process.check("prefix cache")
        with self.lock:
            made = RemoteReservation(next(self._numbers), self._ended, is_load)
            if not is_lease:
                self._jobs.add(made.id)
        return made

    # The caller holds the lock.

    def _exchange(
        self, flags: int, message: bytes = b"", *then: Callable[[array[int]], object]
    ) -> None:
        """Sends a request, and takes answers: those that have come, or without MSG_DONTWAIT all."""
        self._process.check("prefix cache")
        with self.lock:
            try:
                self.send(message, *then)
                while self._outbox and self._connection is not None and not self._failure:
                    left = b"".join(self._outbox)
                    try:
                        sent = self._connection.send(left, flags)  # less, if a signal comes
                    except BlockingIOError:
                        if not flags:
                            raise
                        break
                    self._outbox = [left[sent:]] if sent < len(left) else []
                    self._moved = time.monotonic()
                while not self._failure and (flags or self._awaited):
                    if self._connection is None:
                        return
                    status, numbers, _ = receive(self._connection, self._inbox, READ_BYTES, flags)
                    self._moved = time.monotonic()
                    if status != Status.RESET:
                        self._awaited.popleft()(numbers)
                        continue
                    self._hear_reset()
            except BlockingIOError:  # nothing has come
                is_waiting = self._awaited or self._outbox
                if not flags or (is_waiting and time.monotonic() - self._moved > self._deadline):
                    self._failure = f"it did not answer within {self._deadline:g} s"
            except OSError as error:
                self._failure = str(error)
            except ValueError as error:  # the server has refused it, and reserves nothing
                if not flags:
                    self._awaited.popleft()
                    raise
                self._failure = str(error)
            except BaseException:  # an answer, or half a message, would be nobody's
                self._failure = "a call was interrupted"
                raise
            if self._failure:
                self._lose(self._failure)

    def _lose(self, why: str) -> None:
        if self._connection is None:
            return
        log.warning("lost the server at %s and its pages: %s", self._path, why)
        self._hear_last_resets(self._connection)
        self.resets = 0
        self._connection.close()
        self._connection = None
        self._forget()
        self._changed.notify_all()

    def _hear_reset(self) -> None:
        """Another engine has reset the index."""
        self.resets += 1
        self._knows_reset = True

    def _hear_last_resets(self, connection: socket.socket) -> None:
        """A request may have failed before what had come was read. Answers are nobody's now."""
        with contextlib.suppress(OSError):  # nothing more has come
            while True:
                with contextlib.suppress(ValueError):  # a refused request
                    status, _, _ = receive(connection, self._inbox, flags=socket.MSG_DONTWAIT)
                    if status == Status.RESET:
                        self._hear_reset()

    def _job_ended(self) -> None:
        if self._connection is None and not self._has_jobs():
            self._changed.notify_all()


def connect_to(path: str) -> tuple[socket.socket, int, int, float]:
    """A connection to the server, its generation, as another one has other memory, the number of
    the session, and the seconds within which the server answers.

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
            _, numbers, magic = receive(connection, bytearray())
        if magic != MAGIC or not numbers:
            raise ConnectionError(
                f"the process that answers at {path} is not a server of this library"
            )
        if numbers[0] != VERSION:
            raise ConnectionError(
                f"the server at {path} has version {numbers[0]} of the protocol, this library "
                f"{VERSION}; use the same release for both"
            )
        _, generation, number, deadline = numbers
    except BaseException:
        connection.close()
        raise
    return connection, generation, number, deadline / 1e6


@contextlib.contextmanager
def _needs_server(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConnectionError(
            f"no server answers at {path}: {error}; start one with "
            f"`python -m torch_kvswap serve --socket {path} --memory ...`"
        ) from error


def receive(
    connection: socket.socket, inbox: bytearray, at_once: int = READ_BYTES, flags: int = 0
) -> tuple[int, array[int], bytes]:
    """The next message: its status, numbers and other bytes. What has come behind it is in the
    inbox, which is nothing if the message has `at_once` bytes.

    Raises OSError if nothing comes, and ValueError if the server refuses what was asked.
    """
    while (message := next_message(inbox)) is None:
        more = connection.recv(at_once, flags)
        if not more:
            raise ConnectionError("it has closed the connection")
        inbox += more
    if message[0] == Status.REFUSED:
        raise ValueError(message[2].decode())
    return message
