"""A clock that tests set."""

from __future__ import annotations


class Clock:
    """Stands for the module time: it passes only in sleep()."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
