"""A free list: what is taken comes back to it and is taken again."""

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
