"""Pinning that goes on when a test says so."""

from __future__ import annotations

import threading

from patience import PATIENCE


class PinningSteps:
    """Holds the thread that pins after each chunk but the first, until it may go on."""

    def __init__(self) -> None:
        self._turns = threading.Semaphore(0)
        self.seen: list[tuple[int, int]] = []

    def __call__(self, ready: int, count: int) -> None:
        self.seen.append((ready, count))
        if threading.current_thread() is not threading.main_thread():
            assert self._turns.acquire(timeout=PATIENCE)

    def go_on(self, chunks: int = 1) -> None:
        self._turns.release(chunks)
