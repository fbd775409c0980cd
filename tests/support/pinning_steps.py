"""Lets a test decide when a pool's next chunk is pinned."""

from __future__ import annotations

import threading

from patience import PATIENCE


class PinningSteps:
    """A pool's `on_progress` that holds the pinning thread after each chunk, until `pin_more`."""

    def __init__(self) -> None:
        self._turns = threading.Semaphore(0)
        self.seen: list[tuple[int, int]] = []

    def __call__(self, ready: int, count: int) -> None:
        self.seen.append((ready, count))
        if threading.current_thread() is not threading.main_thread():
            assert self._turns.acquire(timeout=PATIENCE)

    def pin_more(self, chunks: int = 1) -> None:
        self._turns.release(chunks)
