"""Threads that call a store, and pauses after it has failed or not answered."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from torch_kvswap._native.log import log

# Seconds, read at each use so that tests can set them.
DEADLINE = 5.0  # seconds within which a call must return
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0  # how long the store is left alone after a failure


class StorePausedError(Exception):
    """The store is not called during a pause, or its answer came after the deadline."""


class _Call:
    """A call that has not returned."""

    def __init__(self, task: object) -> None:
        self.task, self.began, self.is_late = task, time.monotonic(), False


class StoreThreads:
    """Runs tasks that call a store in one direction, reading or writing.

    After a call that has failed, or has not returned within DEADLINE, there is a pause, which grows
    with each failure. A thread in such a call hangs until it returns, and no other takes its place.

    They are daemon threads: a call that hangs does not keep the interpreter from exiting. start()
    starts them, so that the owner can keep this object, and close it, before a thread exists.

    Args:
        what (str): the direction and the store, for messages.
        count (int): of threads.
        on_end: called in each thread when it ends.
    """

    def __init__(self, what: str, count: int, on_end: Callable[[], None]) -> None:
        self._what, self._on_end = what, on_end
        self._tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._until, self._seconds = 0.0, FIRST_PAUSE
        self._lock = threading.Lock()  # of the pause
        self._is_closing = False
        self.threads = [
            threading.Thread(target=self._run, name="kvswap-below", daemon=True)
            for _ in range(count)
        ]
        self._calls = dict[int | None, _Call]()

    def start(self) -> None:
        """Raises RuntimeError if the process may have no more threads."""
        for thread in self.threads:
            thread.start()
        self._calls = dict.fromkeys((thread.ident for thread in self.threads), _NO_CALL)

    # Any thread may call these. None waits.

    @property
    def is_away(self) -> bool:
        """Whether there is a pause, all threads hang, or they are to end."""
        return self._is_closing or time.monotonic() < self._until or self.are_all_hung

    @property
    def is_doubtful(self) -> bool:
        """Whether there was a pause, and no call has shown yet that the store works again."""
        return self._until > 0

    @property
    def is_idle(self) -> bool:
        """Whether no task waits for a thread."""
        return self._tasks.empty()

    @property
    def hung(self) -> int:
        """How many threads are in a call that has passed its deadline."""
        return sum(call.is_late for call in self._calls.values())

    @property
    def are_all_hung(self) -> bool:
        return self.hung == len(self.threads)

    def submit(self, task: Callable[[], None]) -> None:
        """Lets a thread run the task. Keeps the GIL."""
        self._tasks.put(task)

    def find_late(self) -> list[Any]:
        """What the calls are for that have passed their deadline. A new one begins a pause."""
        before = time.monotonic() - DEADLINE
        late = [call for call in self._calls.values() if call.began <= before]
        for call in late:
            if not call.is_late:
                self.pause(f"no answer within {DEADLINE:g} s")
                call.is_late = True
        return [call.task for call in late]

    def pause(self, why: str) -> None:
        """Begins a pause, and warns of the first of a row. Changes nothing during a pause."""
        with self._lock:
            if self._is_closing or time.monotonic() < self._until:
                return
            seconds, self._seconds = self._seconds, min(2 * self._seconds, LONGEST_PAUSE)
            level = logging.INFO if self._until else logging.WARNING
            self._until = time.monotonic() + seconds
        log.log(level, "%s pauses for %g s: %s", self._what, seconds, why)

    def end_pause(self) -> None:
        """The store works."""
        with self._lock:
            self._until, self._seconds = 0.0, FIRST_PAUSE

    def close(self) -> None:
        """Lets the threads end when their calls have returned. Tasks that wait are left out."""
        self._is_closing = True
        for _ in self.threads:
            self._tasks.put(None)

    # What tasks call.

    def call(self, task: object, method: Callable[..., Any], *arguments: Any) -> Any:
        """Calls the store.

        Args:
            task: what the call is for; see find_late().

        Raises:
            StorePausedError: there is a pause, or find_late() has found the call.
            Exception: what the method raises.
        """
        if time.monotonic() < self._until:
            raise StorePausedError
        me = threading.get_ident()
        call = self._calls[me] = _Call(task)
        try:
            answer = method(*arguments)
        except BaseException as error:
            if isinstance(error, Exception):
                raise
            raise RuntimeError(f"the store raised {error!r}") from error  # it would end the thread
        finally:
            self._calls[me] = _NO_CALL
        if call.is_late:
            raise StorePausedError
        return answer

    def fail(self, error: Exception) -> None:
        """A task has raised this."""
        if not isinstance(error, StorePausedError):
            self.pause(str(error) if isinstance(error, OSError) else repr(error))

    def _run(self) -> None:
        try:
            while (task := self._tasks.get()) is not None and not self._is_closing:
                try:
                    task()
                except Exception as error:  # such as MemoryError: no other takes this one's place
                    self.fail(error)
                del task  # its memory must not outlive the call
        finally:
            self._on_end()


_NO_CALL = _Call(None)
_NO_CALL.began = float("inf")
