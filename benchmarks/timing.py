"""What the benchmarks measure with: clocks, limits of time, memory, a held stream."""

from __future__ import annotations

import ctypes
import gc
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

Nanoseconds = npt.NDArray[np.int64]
One = TypeVar("One")


def quartiles(samples: Sequence[float]) -> list[float]:
    three: list[float] = np.percentile(samples, [25, 50, 75]).tolist()
    return three


def summary(samples: Sequence[float]) -> dict[str, Any]:
    """What the JSON files keep of samples."""
    return {"count": len(samples), "quartiles": rounded(quartiles(samples))}


def rounded(numbers: Sequence[float]) -> list[float]:
    return [round(number, 4) for number in numbers]


@dataclass(frozen=True)
class Spread:
    """How long the calls of a kind took, in microseconds."""

    median: float
    p99: float

    @classmethod
    def of(cls, samples: Nanoseconds) -> Spread:
        return cls(*(round(float(n) / 1e3, 3) for n in np.percentile(samples, [50, 99])))


@dataclass(frozen=True)
class Move:
    """What one or more transfers at once took, in microseconds.

    total_us: from the first call until the host has seen all ends. submit_us: in the calls alone.
    copy_method: the one that was used, if the library moved the bytes.
    """

    total_us: float
    submit_us: float
    copy_method: str | None = None


class TimeLimit:
    """Divides the seconds that a program may take among its parts.

    A part that takes less leaves the rest to those after it. Begins when it is made.

    Args:
        seconds: None for no limit.
        parts: how many there are.
    """

    def __init__(self, seconds: float | None, parts: int) -> None:
        self._end = None if seconds is None else perf_counter() + seconds
        self._parts = parts

    def next_part(self) -> float:
        """Returns the time of perf_counter() at which the next part should end."""
        if self._end is None:
            return math.inf
        now = perf_counter()
        share = max(0.0, self._end - now) / max(1, self._parts)
        self._parts -= 1
        return now + share


def in_turn(ways: Sequence[One], number: int) -> list[One]:
    """All ways. Which of them comes first changes with the number of the round, so that none always
    has the same one before it."""
    first = number % len(ways)
    return [*ways[first:], *ways[:first]]


def resident_bytes() -> int:
    """Of this process; what malloc and Python keep for later is given back first."""
    gc.collect()
    if hasattr(_libc, "malloc_trim"):
        _libc.malloc_trim(0)
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * _page


_libc = ctypes.CDLL(None)
_page = os.sysconf("SC_PAGE_SIZE")


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Call:
    """What a call takes, on the host and on a stream. Begins when it is made."""

    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        self._stream = stream
        self._events: list[Any] = []
        if stream is not None:
            event: Any = torch.cuda.Event  # it has no types
            self._events = [event(enable_timing=True) for _ in range(2)]
        self._record(0)
        self._begin = perf_counter()

    def end(self) -> None:
        self.host = (perf_counter() - self._begin) * 1e6
        self._record(1)

    @property
    def on_stream(self) -> float:
        """Microseconds from the begin until the stream has done what it was given; waits for it."""
        if not self._events:
            return self.host
        self._events[1].synchronize()
        return float(self._events[0].elapsed_time(self._events[1])) * 1e3

    def _record(self, index: int) -> None:
        if self._events:
            self._events[index].record(self._stream)


class Hold:
    """A kernel that keeps a stream busy for about so many seconds."""

    def __init__(self, stream: torch.cuda.Stream, seconds: float) -> None:
        self.event = torch.cuda.Event()
        cycles = int(seconds * _cycles_per_second(stream.device))
        with torch.cuda.stream(stream):
            torch.cuda._sleep(cycles)
            self.event.record()

    @property
    def is_over(self) -> bool:
        return bool(self.event.query())

    def wait(self) -> None:
        self.event.synchronize()


_rates: dict[torch.device, float] = {}


def _cycles_per_second(device: torch.device) -> float:
    if device not in _rates:
        cycles = 50_000_000
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.device(device):
            torch.cuda._sleep(cycles)  # the clock rises
            start.record()
            torch.cuda._sleep(cycles)
            end.record()
            end.synchronize()
        _rates[device] = cycles / start.elapsed_time(end) * 1e3
    return _rates[device]
