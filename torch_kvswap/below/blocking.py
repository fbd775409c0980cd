"""A store whose calls block: threads carry them out."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue

from torch_kvswap.below.store import Completion

_THREADS = 4  # with more, pages are no faster, and lookups wait for the GIL (benchmarks/below.py)
_Answers = tuple[list[bool], str]  # of each key, and what went wrong
_Work = Callable[[], _Answers]


class _Batch:
    """A call of which some keys have not ended yet."""

    def __init__(self, number: int, keys: int) -> None:
        self.number, self.left = number, keys
        self.are_right = [False] * keys
        self.error = ""
        self.is_lost = False  # the store is away: keys that were not begun are left out


class ThreadedStore:
    """The part of a PageStore that carries out calls in so many threads, and keeps outcomes."""

    def __init__(self, threads: int) -> None:
        self._numbers = itertools.count(1)
        self._ended: deque[Completion] = deque()
        self._event_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._lock = threading.Lock()  # of the batches
        self._is_closing = False
        self._tasks: SimpleQueue[tuple[_Batch, range, _Work] | None] = SimpleQueue()
        name = f"kvswap-{type(self).__name__}"
        self._threads = [
            threading.Thread(target=self._run, name=name, daemon=True) for _ in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def interrupt(self) -> None:
        """Lets methods that run in other threads end soon. close() waits for them."""

    def event_fd(self) -> int:
        return self._event_fd

    def drain_completions(self) -> list[Completion]:
        with contextlib.suppress(BlockingIOError):  # nothing has ended
            os.eventfd_read(self._event_fd)
        ended = []
        while self._ended:
            ended.append(self._ended.popleft())
        return ended

    def close(self) -> None:
        """See PageStore. What was not begun is left out."""
        if self._is_closing:
            return
        self._is_closing = True
        for _ in self._threads:
            self._tasks.put(None)
        self.interrupt()
        for thread in self._threads:
            thread.join()
        os.close(self._event_fd)

    def _submit(self, keys: int, part: int, call: Callable[[range], _Answers]) -> int:
        """Lets threads call it with the places of so many keys at a time, which it answers for."""
        batch = _Batch(next(self._numbers), keys)
        if not keys:
            self._end(batch)
        for first in range(0, keys, part or 1):
            places = range(first, min(first + part, keys))
            self._tasks.put((batch, places, partial(call, places)))
        return batch.number

    def _run(self) -> None:
        """A thread: carries out tasks until close()."""
        while (task := self._tasks.get()) is not None:
            batch, places, work = task
            are_right, error = [False] * len(places), ""
            if self._is_closing:
                error = "the store was closed"
            elif not batch.is_lost:  # else another thread says why
                try:
                    are_right, error = work()
                except Exception as problem:  # whatever somebody else's store raises
                    batch.is_lost |= isinstance(problem, ConnectionError | TimeoutError)
                    error = str(problem) or repr(problem)
            del task, work  # its memory must not outlive the call
            with self._lock:
                batch.are_right[places.start : places.stop] = are_right
                batch.error = batch.error or error
                batch.left -= len(places)
                if batch.left == 0:
                    self._end(batch)

    def _end(self, batch: _Batch) -> None:
        self._ended.append((batch.number, not batch.error, batch.error, batch.are_right))
        os.eventfd_write(self._event_fd, 1)


class BlockingStore(ThreadedStore, ABC):
    """A PageStore on four methods that block, which a derived class has.

    Several threads call them. An exception means that the call has failed: nothing is known of its
    keys. Its text is the error of the call. After a ConnectionError or TimeoutError the rest of the
    call is left out, so that a store that hangs holds up each thread once.
    """

    def __init__(self) -> None:
        super().__init__(_THREADS)

    @abstractmethod
    def set(self, key: str, memory: memoryview) -> None:
        """Stores the bytes under the key. Replaces what the key has."""

    @abstractmethod
    def get(self, key: str, memory: memoryview) -> bool:
        """Reads the bytes of the key. False if they are not there, or not as many."""

    @abstractmethod
    def exists(self, keys: list[str]) -> list[bool]:
        """Which of these keys are there."""

    @abstractmethod
    def delete(self, keys: list[str]) -> list[bool]:
        """Deletes these keys, and returns which were there, as far as it knows."""

    def submit_batch_set(self, keys: list[str], memoryviews: list[memoryview]) -> int:
        def set_one(key: str, memory: memoryview) -> bool:
            self.set(key, memory)
            return True

        return self._submit_each(set_one, keys, memoryviews)

    def submit_batch_get(self, keys: list[str], memoryviews: list[memoryview]) -> int:
        return self._submit_each(self.get, keys, memoryviews)

    def submit_batch_exists(self, keys: list[str]) -> int:
        return self._submit_parts(self.exists, keys)

    def submit_batch_delete(self, keys: list[str]) -> int:
        return self._submit_parts(self.delete, keys)

    def _submit_each(
        self,
        call: Callable[[str, memoryview], bool],
        keys: list[str],
        memoryviews: list[memoryview],
    ) -> int:
        def one(places: range) -> _Answers:
            return [call(keys[places.start], memoryviews[places.start])], ""

        return self._submit(len(keys), 1, one)

    def _submit_parts(self, call: Callable[[list[str]], list[bool]], keys: list[str]) -> int:
        def some(places: range) -> _Answers:
            return list(call(keys[places.start : places.stop])), ""

        return self._submit(len(keys), -(-len(keys) // _THREADS), some)
