"""A clock that only moves when a test moves it."""

from __future__ import annotations


class Clock:
    """Takes the place of the module `time`; only sleep() makes time pass."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
