"""A store of pages in memory, which tests can make fail and hold up."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

from torch_kvswap.below import Completion


class MemoryStore:
    """Carries out each call when it is answered: at once, or in release() for those in `held`.

    objects: what it keeps; several stores may share it. held, refused, failing: operations that are
    not answered yet, raise, or do nothing and say so. broken: names that a get cannot read. lying:
    names that exists() says are there.
    """

    def __init__(self, objects: dict[str, bytes] | None = None) -> None:
        self.objects = {} if objects is None else objects
        self.held: set[str] = set()
        self.refused: set[str] = set()
        self.failing: set[str] = set()
        self.broken: set[str] = set()
        self.lying: set[str] = set()
        self.calls: list[str] = []
        self.waiting: deque[Callable[[], None]] = deque()
        self.is_closed = False
        self._ended: deque[Completion] = deque()
        self._fd = os.eventfd(0, os.EFD_NONBLOCK)

    def submit_batch_set(self, keys: list[str], memoryviews: list[memoryview]) -> int:
        def put(place: int) -> bool:
            self.objects[keys[place]] = bytes(memoryviews[place])
            return True

        return self._submit("set", keys, put)

    def submit_batch_get(self, keys: list[str], memoryviews: list[memoryview]) -> int:
        def get(place: int) -> bool:
            found = self.objects.get(keys[place])
            if found is None or len(found) != len(memoryviews[place]):
                return False
            memoryviews[place][:] = found
            return True

        return self._submit("get", keys, get)

    def submit_batch_exists(self, keys: list[str]) -> int:
        known = self.lying
        return self._submit(
            "exists", keys, lambda place: keys[place] in self.objects or keys[place] in known
        )

    def submit_batch_delete(self, keys: list[str]) -> int:
        def delete(place: int) -> bool:
            return self.objects.pop(keys[place], None) is not None

        return self._submit("delete", keys, delete)

    def event_fd(self) -> int:
        return self._fd

    def drain_completions(self) -> list[Completion]:
        with suppress(BlockingIOError):
            os.eventfd_read(self._fd)
        return [self._ended.popleft() for _ in range(len(self._ended))]

    def close(self) -> None:
        assert not self.is_closed
        self.is_closed = True
        os.close(self._fd)

    def release(self) -> None:
        """Answers what was held, and holds nothing any more."""
        self.held.clear()
        while self.waiting:
            self.waiting.popleft()()

    def _submit(self, what: str, keys: Sequence[str], of_key: Callable[[int], bool]) -> int:
        if what in self.refused:
            raise OSError(f"no {what} today")
        self.calls.append(what)
        number = len(self.calls)

        def answer() -> None:
            is_failing = what in self.failing or (
                what == "get" and not self.broken.isdisjoint(keys)
            )
            are_right = [
                what not in self.failing and keys[place] not in self.broken and of_key(place)
                for place in range(len(keys))
            ]
            error = f"{what} failed" if is_failing else ""
            self._ended.append((number, not is_failing, error, are_right))
            os.eventfd_write(self._fd, 1)

        if what in self.held:
            self.waiting.append(answer)
        else:
            answer()
        return number
