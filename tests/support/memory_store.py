"""A store of pages in memory, which tests can make fail and hold up."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from torch_kvswap.below import PageStore


class MemoryStore(PageStore):
    """Carries out each call at once, or in release() if it is of those in `held`.

    objects: what it keeps; several stores may share it. held, failing: methods that do not return
    yet, or raise. lying: names that exists() says are there.
    deleted: what delete() has deleted, or has not found.
    """

    def __init__(self, objects: dict[str, bytes] | None = None) -> None:
        self.objects = {} if objects is None else objects
        self.held: set[str] = set()
        self.failing: set[str] = set()
        self.lying: set[str] = set()
        self.calls: list[str] = []
        self.deleted: list[str] = []
        self.waiting: deque[Callable[[], None]] = deque()
        self.is_closed = False
        self._lock = threading.Lock()

    def exists(self, keys: list[str]) -> list[bool]:
        self._end("exists", keys, self._begin("exists", keys))
        return [key in self.objects or key in self.lying for key in keys]

    def get(
        self, keys: list[str], pages: list[memoryview], trailers: list[memoryview]
    ) -> list[bool]:
        some = self._begin("get", keys)
        came = [self._get(*one) for one in zip(some, pages, trailers, strict=False)]
        self._end("get", keys, some)
        return came + [False] * (len(keys) - len(came))

    def put(self, keys: list[str], pages: list[memoryview], trailers: list[memoryview]) -> None:
        some = self._begin("put", keys)
        for key, page, trailer in zip(some, pages, trailers, strict=False):
            self.objects[key] = bytes(page) + bytes(trailer)
        self._end("put", keys, some)

    def delete(self, keys: list[str]) -> None:
        some = self._begin("delete", keys)
        for key in some:
            self.objects.pop(key, None)
            self.deleted.append(key)
        self._end("delete", keys, some)

    def close(self) -> None:
        assert not self.is_closed
        self.is_closed = True

    def release(self) -> None:
        """Carries out what was held, and holds nothing any more."""
        with self._lock:
            self.held.clear()
            while self.waiting:
                self.waiting.popleft()()

    def _get(self, key: str, page: memoryview, trailer: memoryview) -> bool:
        found = memoryview(self.objects.get(key, b""))
        for part, of_part in ((page, found[: len(page)]), (trailer, found[len(page) :])):
            size = min(len(part), len(of_part))  # as far as it goes
            part[:size] = of_part[:size]
        return len(found) > 0

    def _begin(self, what: str, keys: list[str]) -> list[str]:
        """Hangs, or not. Returns the keys that the call gets to before it fails: all, or fewer."""
        go_on = threading.Event()
        with self._lock:
            self.calls.append(what)
            if what in self.held:
                self.waiting.append(go_on.set)
            else:
                go_on.set()
        go_on.wait()
        if what in self.failing:
            raise OSError(f"no {what} today")
        return keys

    def _end(self, what: str, keys: list[str], done: list[str]) -> None:
        """Raises if the call has failed."""
