"""Processes of this user that connect to a Unix socket, and their messages, in one thread."""

from __future__ import annotations

import contextlib
import errno
import os
import sched
import selectors
import socket
import time
import weakref
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable

from torch_kvswap._native import rendezvous
from torch_kvswap._native.descriptors import Descriptors
from torch_kvswap._native.log import log
from torch_kvswap._native.process_lock import is_free
from torch_kvswap.prefix.protocol import JOINING, READ_BYTES, Status, next_message, pack

_LOCK_SECONDS = 0.1  # between checks whether a dead process's forked children have ended
_FORK_SECONDS = 5.0  # before the log says that they have not
_PAUSE_SECONDS = 1.0  # without new connections, after the file descriptors have run out
_NO_DESCRIPTORS = errno.EMFILE, errno.ENFILE


class EventLoop:
    """Calls what is to be done when a descriptor is ready or a time has come, in run().

    Whatever one call raises, the others are made.

    Attributes:
        clock: returns seconds.
    """

    def __init__(self) -> None:
        self.clock = time.monotonic
        self._selector = selectors.DefaultSelector()
        self._timers = sched.scheduler(lambda: self.clock())
        self._is_over = False
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        weakref.finalize(self, os.close, self._wake_fd)  # stop() may come after run() has ended
        self.watch(self._wake_fd, lambda _: os.eventfd_read(self._wake_fd))

    def run(self, after_each: Callable[[], None]) -> None:
        """Goes on until stop() is called. after_each: called after each wait."""
        while not self._is_over:
            for key, events in self._selector.select(self._timers.run(blocking=False)):
                self._do(key.data, events)
            self._do(after_each)

    def _do(self, call: Callable[..., object], *arguments: object) -> None:
        try:
            call(*arguments)
        except Exception:
            log.exception("an error in the server, which goes on")

    def wake(self) -> None:
        """Ends the wait. Any thread may call, and a signal handler."""
        os.eventfd_write(self._wake_fd, 1)

    def stop(self) -> None:
        """Ends run(). Any thread may call, and a signal handler."""
        self._is_over = True
        self.wake()

    def later(self, seconds: float, call: Callable[[], None]) -> None:
        """Calls it after so many seconds."""
        self._timers.enter(seconds, 0, self._do, (call,))

    def watch(
        self,
        file: socket.socket | int,
        call: Callable[[int], object],
        events: int = selectors.EVENT_READ,
    ) -> None:
        """Calls it with the events of this file, instead of what was called before.

        Raises OSError if the kernel watches no more.
        """
        is_known = file in self._selector.get_map()
        change = self._selector.modify if is_known else self._selector.register
        change(file, events, call)

    def unwatch(self, file: socket.socket | int) -> None:
        """Idempotent."""
        if file in self._selector.get_map():
            self._selector.unregister(file)

    def close(self) -> None:
        self._selector.close()


class Listener:
    """Accepts the processes of this user at a Unix socket.

    Args:
        path (str): see rendezvous.listen(), also for what is raised.
        admit: makes a Peer of a connection, the number of its process, and a descriptor of it.
    """

    def __init__(
        self, path: str, loop: EventLoop, admit: Callable[[socket.socket, int, int], object]
    ) -> None:
        self._loop, self._admit = loop, admit
        self._socket, self._lock_file = rendezvous.listen(path)
        self._spare: int | None = None  # a descriptor, see _refuse_next()
        self._is_full = False  # whether it was said that there are no descriptors
        self._listen()

    def _listen(self) -> None:
        """Waits for connections, once a descriptor is reserved."""
        try:
            if self._spare is None:
                self._spare = os.dup(self._lock_file)
            self._loop.watch(self._socket, self._accept)
        except OSError:
            self._loop.later(_PAUSE_SECONDS, self._listen)

    def _accept(self, _: object = None) -> None:
        try:
            connection, _ = self._socket.accept()
        except OSError as error:
            if error.errno in _NO_DESCRIPTORS:
                self._refuse_next(error)
            return  # else it has gone already
        connection.setblocking(False)
        try:
            self._admit(connection, *rendezvous.peer_of(connection))
            self._is_full = False
        except OSError as error:
            self._refuse(connection, error)

    def _refuse_next(self, error: OSError) -> None:
        """Refuses a process with the descriptor that is kept for this.

        Otherwise the socket would stay readable, and the loop would never wait again.
        """
        self._loop.unwatch(self._socket)
        if self._spare is not None:
            os.close(self._spare)
            self._spare = None
            with contextlib.suppress(OSError):
                self._refuse(self._socket.accept()[0], error)
        self._listen()

    def _refuse(self, connection: socket.socket, error: OSError) -> None:
        was_full, self._is_full = self._is_full, error.errno in _NO_DESCRIPTORS
        why = str(error)
        if self._is_full:
            why = "this server has no file descriptors left; raise its limit (ulimit -n)"
        if not (self._is_full and was_full):
            log.warning("a process is not served: %s", why)
        with connection, contextlib.suppress(OSError):
            connection.send(pack(Status.REFUSED, data=why.encode()))

    def close(self) -> None:
        """Another server may have the path then."""
        self._socket.close()
        if self._spare is not None:
            os.close(self._spare)
        os.close(self._lock_file)


class Peer(ABC):
    """A process that has connected. It outlives its connection until drop().

    A process that is slow, sends garbage or dies harms no other one.

    Args:
        connection (socket): does not block.
        pid (int): the number of the process.
        process (int): a file descriptor, readable when the process has ended; closed by drop().

    Attributes:
        connection (socket | None): None when it is lost.
        pid (int): of the process.
        lock (Descriptors | None): what it has sent; see process_lock.is_free().
        is_dead (bool): the process has ended; what was forked from it may not have.

    Raises OSError if the kernel watches no more.
    """

    def __init__(self, loop: EventLoop, connection: socket.socket, pid: int, process: int) -> None:
        self.pid, self.is_dead = pid, False
        self.lock: Descriptors | None = None
        self.connection: socket.socket | None = connection
        self._loop = loop
        self._process: int | None = process  # None after drop()
        self._received = bytearray()  # of a message that is not complete
        self._unsent = b""  # what it has not taken; until then nothing is received from it
        self._deadline: float | None = None  # by which it must have said who it is
        try:
            loop.watch(process, self._process_ended)
            loop.watch(connection, self._serve)
        except OSError as error:
            self.connection = None  # the caller tells why
            self.drop()
            raise OSError(
                f"the kernel watches no more engines: {error}; see fs.epoll.max_user_watches"
            ) from error

    @abstractmethod
    def take(self, kind: int, numbers: array[int], data: bytes) -> None:
        """A message has come. What this raises ends the connection."""

    @abstractmethod
    def lost(self) -> None:
        """The connection has ended."""

    @abstractmethod
    def ended(self) -> None:
        """The process has ended, and all that were forked from it: its copies have, too."""

    def expect(self) -> None:
        """Ends the connection if the process does not say in time who it is."""
        self._deadline = self._loop.clock() + JOINING
        self._loop.later(JOINING, self._end_silent)

    def recognize(self) -> None:
        """The process has said who it is. It sends no lock any more."""
        self._deadline = None

    def _end_silent(self) -> None:
        is_late = self._deadline is not None and self._deadline <= self._loop.clock()
        if is_late and self.connection is not None:
            log.warning("process %d has sent nothing for %g s", self.pid, JOINING)
            self.disconnect()

    def send(self, data: bytes = b"") -> None:
        """Sends it, or keeps what the process does not take, and then receives nothing from it."""
        assert self.connection is not None
        had_some, data, sent = bool(self._unsent), self._unsent + data, 0
        try:
            sent = self.connection.send(data)
        except BlockingIOError:
            pass
        except OSError:  # it has gone, and the next recv() says so: perhaps it has said LEAVE
            sent = len(data)
        self._unsent = data[sent:]
        if had_some != bool(self._unsent):
            events = selectors.EVENT_WRITE if self._unsent else selectors.EVENT_READ
            self._loop.watch(self.connection, self._serve, events)

    def _serve(self, events: int) -> None:
        """Receives, or sends the rest of an answer."""
        if self.connection is None:  # lost since select() has returned
            return
        try:
            if events & selectors.EVENT_WRITE:
                self.send()
            else:
                try:
                    data = self._receive(self.connection)
                except BlockingIOError:  # nothing has come
                    return
                if not data:
                    return self.disconnect()
                self._received += data
            while not self._unsent and (message := next_message(self._received)) is not None:
                self.take(*message)
        except Exception as error:  # it ends this connection only
            if self.connection is not None:
                text = str(error) or type(error).__name__
                log.warning("the connection of process %d is closed: %s", self.pid, text)
                self.disconnect()

    def _receive(self, connection: socket.socket) -> bytes:
        if self._deadline is None:
            return connection.recv(READ_BYTES)
        data, came = rendezvous.receive(connection, READ_BYTES)
        if came.fds:
            is_free(came.fd)  # raises OSError if it can be no lock
            if self.lock is not None:
                self.lock.close()
            self.lock = came
        return data

    def _process_ended(self, _: object) -> None:
        if self._process is None:  # dropped since select() has returned
            return
        self.is_dead = True
        self._loop.unwatch(self._process)
        self._await_forks()
        self._loop.later(_FORK_SECONDS, self._tell_of_forks)

    def _has_forks(self) -> bool:
        """Whether what was forked from it has not ended."""
        if self._process is None or self.lock is None:
            return False
        try:
            return not is_free(self.lock.fd)
        except OSError:  # the kernel has no memory to say so: later
            return True

    def _await_forks(self) -> None:
        """Until what was forked from it has ended, too, its copies may run."""
        if self._process is None:
            return
        if self._has_forks():
            self._loop.later(_LOCK_SECONDS, self._await_forks)
        else:
            self.ended()

    def _tell_of_forks(self) -> None:
        if self._has_forks():
            log.warning(
                "process %d has ended, but a process that it had forked has not: its pages stay "
                "reserved, because its copies may still run; end that process, too",
                self.pid,
            )

    def disconnect(self) -> None:
        """Idempotent."""
        if self.connection is not None:
            self._loop.unwatch(self.connection)
            self.connection.close()
            self.connection = None
            self._received.clear()
            self.lost()

    def drop(self) -> None:
        """Forgets the process, whose end is not told any more."""
        if self._process is not None:
            self._loop.unwatch(self._process)
            os.close(self._process)
            self._process = None
        if self.lock is not None:
            self.lock.close()
        self.disconnect()
