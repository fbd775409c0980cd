"""The thread that makes all calls of a store, and what it does when the store does not answer."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

from torch_kvswap._native.loader import ForkGuard, native
from torch_kvswap._native.log import log
from torch_kvswap.below.store import Completion, PageStore

# Seconds, read at each use so that tests can set them.
DEADLINE = 5.0  # of a call, since it or one that began before it has moved on
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0  # how long the store is left alone after a failure

# Calls of the store that follow one another. Yields what begin() has returned, and gets whether
# each key went well; or yields None, and goes on when another call has ended.
Steps = Generator["int | None", "list[bool]", None]


class StoreError(Exception):
    """The store has not taken a call."""


class Pause:
    """Whether the store is left alone in one direction, for a time that grows with each failure.

    Any thread may call.

    Args:
        what (str): the direction and the store, for messages.

    Attributes:
        progress (float): when a call of this direction has ended last, or one in front of it.
    """

    def __init__(self, what: str) -> None:
        self._what, self.progress = what, 0.0
        self.until, self._seconds = 0.0, FIRST_PAUSE

    @property
    def is_on(self) -> bool:
        return time.monotonic() < self.until

    @property
    def is_over(self) -> bool:
        """Whether there was one, and nothing has shown yet that the store works again."""
        return 0 < self.until <= time.monotonic()

    def begin(self, why: str) -> None:
        """Something has failed. Changes nothing during a pause. Warns of the first of a row."""
        if self.is_on:
            return
        level = logging.INFO if self.until else logging.WARNING
        log.log(level, "%s pauses for %g s: %s", self._what, self._seconds, why)
        self.until = time.monotonic() + self._seconds
        self._seconds = min(2 * self._seconds, LONGEST_PAUSE)

    def end(self) -> None:
        """The store works."""
        self.until, self._seconds = 0.0, FIRST_PAUSE


@dataclass(eq=False)
class _Call:
    """A call that the store has not answered.

    `memory` is what the store reads or writes, kept alive. `steps` are None until they wait for it.
    """

    pause: Pause
    began: float
    deadline: float
    num_keys: int
    memory: Sequence[memoryview]
    on_late: Callable[[], None] | None
    steps: Steps | None = None


class StoreThread:
    """Runs steps, which call the store, in a thread of its own.

    Args:
        store (PageStore): closed by close().
        on_wake: called in the thread after it was woken or a call has ended; returns when it wants
            to be called next, as time.monotonic() says it.

    Attributes:
        error (str): what the store said of the call that steps have waited for last.
        was_late (bool): whether the answer came after the deadline.
    """

    def __init__(self, store: PageStore, on_wake: Callable[[], float]) -> None:
        self._store, self._on_wake = store, on_wake
        self._event_fd = store.event_fd()
        self._process = ForkGuard()
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._calls: dict[int, _Call] = {}
        self._waiting: deque[Steps] = deque()
        self.error, self.was_late = "", False
        self._lock = threading.Lock()  # of _is_closing, and of the descriptor's life
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="kvswap-below", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether the store may still use memory."""
        return self._thread.is_alive()

    def wake(self) -> None:
        """Lets the thread call on_wake() soon. Any thread may call."""
        with self._lock:
            if self._wake_fd >= 0:
                native.wake(self._wake_fd)

    def close(self) -> bool:
        """Ends the thread, which closes the store. Idempotent; any thread may call.

        Returns:
            bool: False if the store does not close within DEADLINE: it may still use memory, which
                this thread keeps.
        """
        if not self._process.is_current:  # a forked child has no such thread
            return True
        with self._lock:
            self._is_closing = True
        self.wake()
        if threading.current_thread() is self._thread:  # a finalizer
            return False
        self._thread.join(DEADLINE)
        if self._thread.is_alive():
            log.warning(
                "the store below has not been closed within %g s; until it is, the memory that it "
                "may still use stays mapped, and the prefix cache counts as open",
                DEADLINE,
            )
        return not self._thread.is_alive()

    # What steps call, in the thread.

    def run(self, steps: Steps, answers: list[bool] | None = None) -> None:
        """Runs steps until they wait, with the answers of the call that they have waited for."""
        try:
            number = next(steps) if answers is None else steps.send(answers)
        except StopIteration:
            return
        if number is None:
            self._waiting.append(steps)
        else:
            self._calls[number].steps = steps

    def begin(
        self,
        what: str,
        keys: list[str],
        memory: Sequence[memoryview],
        pause: Pause,
        on_late: Callable[[], None] | None = None,
    ) -> int:
        """Begins a call of the store: "set", "get", "exists" or "delete".

        Args:
            what (str): which one.
            keys (list[str]): of the objects.
            memory (Sequence[memoryview]): of each object, for a set or a get.
            pause (Pause): begins if the call fails or takes too long.
            on_late: called if neither this call nor one that began before it ends within DEADLINE.
                The steps still wait for it.

        Returns:
            int: to be yielded before anything else is.

        Raises:
            StoreError: the store has refused the call.
        """
        submit = getattr(self._store, f"submit_batch_{what}")
        try:
            number: int = submit(keys, list(memory)) if memory else submit(keys)
        except Exception as error:  # whatever somebody else's store raises
            reason = f"{what} raised {error!r}"
            pause.begin(reason)
            raise StoreError(reason) from error
        now = time.monotonic()
        self._calls[number] = _Call(pause, now, now + DEADLINE, len(keys), memory, on_late)
        return number

    def _run(self) -> None:
        with contextlib.suppress(OSError):  # a sandbox may forbid it: then lookups take longer
            # Of this thread: it does not take the core of the scheduler that wakes it.
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        try:
            poller = select.poll()
            poller.register(self._wake_fd, select.POLLIN)
            poller.register(self._event_fd, select.POLLIN)
            while not self._is_closing:
                self._find_late()
                wanted = self._on_wake()
                wanted = min([wanted, *(call.deadline for call in self._calls.values())])
                seconds = max(wanted - time.monotonic(), 0)
                poller.poll(None if wanted == float("inf") else seconds * 1e3 + 1)
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._wake_fd)
                for completion in self._drain():
                    self._end_call(*completion)
                for _ in range(len(self._waiting)):
                    self.run(self._waiting.popleft())
        finally:
            with self._lock:
                os.close(self._wake_fd)
                self._wake_fd = -1
            self._store.close()
            self._calls.clear()  # frees the memory

    def _find_late(self) -> None:
        now = time.monotonic()
        for call in self._calls.values():
            if call.deadline <= now:
                call.deadline = float("inf")
                call.pause.begin(f"no answer within {DEADLINE:g} s")
                if call.on_late is not None:
                    call.on_late()

    def _drain(self) -> list[Completion]:
        try:
            return self._store.drain_completions()
        except Exception as error:  # whatever somebody else's store raises
            for call in self._calls.values():
                call.pause.begin(f"drain_completions raised {error!r}")
            time.sleep(0.1)  # its descriptor may stay readable
            return []

    def _end_call(
        self, number: int, is_right: bool, error: str, of_keys: Sequence[bool] | None
    ) -> None:
        call = self._calls.pop(number, None)
        if call is None:
            return
        call.pause.progress = now = time.monotonic()
        # A slow store carries out one call after another. One that has lost a call may end later
        # ones for ever: they do not count.
        for other in self._calls.values():
            if other.began >= call.began and other.deadline != float("inf"):
                other.deadline, other.pause.progress = now + DEADLINE, now
        if call.steps is None:
            return
        answers = [is_right] * call.num_keys if of_keys is None else [bool(key) for key in of_keys]
        if len(answers) != call.num_keys:
            answers = [False] * call.num_keys
        self.error, self.was_late = error, call.deadline == float("inf")
        self.run(call.steps, answers)
