"""What is made once and used again: a free list, and a ring."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Pool(Generic[T]):
    """Makes an item when none is idle; holds as many as were ever in use at once.

    Whoever takes an item owns it until it is given back, and gives it back only when nothing on a
    device uses it any more. Not thread safe: the owner of the pool has a lock.
    """

    def __init__(self, create: Callable[[], T]) -> None:
        self._create = create
        self._idle: list[T] = []
        self.created = 0  # that exist: idle or in use

    @property
    def idle(self) -> int:
        return len(self._idle)

    @property
    def in_use(self) -> int:
        return self.created - self.idle

    def take(self) -> T:
        """An idle item, or a new one. Raises what creating one raises; then nothing is counted."""
        if self._idle:
            return self._idle.pop()
        item = self._create()
        self.created += 1
        return item

    def give(self, item: T) -> None:
        self._idle.append(item)

    def clear(self) -> None:
        """Lets the idle items go."""
        self.created -= len(self._idle)
        self._idle.clear()


class Ring(Generic[T]):
    """A fixed number of items, all made at once, used in turn and by many at a time.

    Not thread safe: the owner of the ring has a lock. Raises what creating one raises; then none
    of them is left.
    """

    def __init__(self, create: Callable[[], T], free: Callable[[T], None], count: int) -> None:
        self._free = free
        self._items: list[T] = []
        self._turn = 0
        try:
            for _ in range(count):
                self._items.append(create())
        except BaseException:
            self.clear()
            raise

    def next(self) -> T:
        item = self._items[self._turn]
        self._turn = (self._turn + 1) % len(self._items)
        return item

    def clear(self) -> None:
        """Frees the items. A second time there are none."""
        while self._items:
            self._free(self._items.pop())
