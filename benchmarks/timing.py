"""What the benchmarks measure with: clocks, memory of the process, a held stream, one big copy."""

from __future__ import annotations

import ctypes
import gc
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Nanoseconds = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Spread:
    """How long the calls of a kind took, in microseconds."""

    median: float
    mean: float
    p90: float
    p99: float
    p999: float
    max: float

    @classmethod
    def of(cls, samples: Nanoseconds) -> Spread:
        numbers = [*np.percentile(samples, [50, 90, 99, 99.9, 100]), samples.mean()]
        median, p90, p99, p999, longest, mean = (round(float(n) / 1e3, 3) for n in numbers)
        return cls(median, mean, p90, p99, p999, longest)


def new_samples(count: int) -> Nanoseconds:
    """Written once, so that its pages are there before memory is measured."""
    return np.full(count, -1, np.int64)


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


def seconds_of(call: Callable[[], object], device: torch.device, repeats: int = 5) -> float:
    """From the call until the host sees the device idle; the median, after one warm-up."""
    seconds = []
    for _ in range(repeats + 1):
        synchronize(device)
        start = time.perf_counter()
        call()
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


def big_copy_seconds(pages: Tensor, device: torch.device) -> dict[str, float]:
    """Moving all of the pages (bytes) at once: to them, from them, and half of them each way at the
    same time. What the pages hold is lost."""
    there = torch.zeros_like(pages, device=device)
    half = len(pages) // 2
    side = torch.cuda.Stream(device) if device.type == "cuda" else None

    def both() -> None:
        pages[:half].copy_(there[:half], non_blocking=True)
        with torch.cuda.stream(side):  # None: no other stream
            there[half:].copy_(pages[half:], non_blocking=True)

    return {
        "store": seconds_of(lambda: pages.copy_(there, non_blocking=True), device),
        "load": seconds_of(lambda: there.copy_(pages, non_blocking=True), device),
        "both": seconds_of(both, device),
    }


class BigCopy:
    """One copy between the device and pinned memory, whose event the host looks at in a loop.

    Calls the driver itself: PyTorch would add several microseconds. Without a GPU, PyTorch's copy.
    """

    def __init__(self, device: torch.device, nbytes: int, driver: Any = None) -> None:
        on_cuda = device.type == "cuda"
        self._there = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        self._host = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=on_cuda)
        self._driver = driver or (ctypes.CDLL("libcuda.so.1") if on_cuda else None)
        if self._driver is None:
            return
        self._torch_stream = torch.cuda.Stream(device) if on_cuda else None  # keeps it
        self._stream = ctypes.c_void_p(getattr(self._torch_stream, "cuda_stream", None))
        self._event = ctypes.c_void_p()
        _check(self._driver.cuEventCreate(ctypes.byref(self._event), 2), "cuEventCreate")  # untimed

    def nanoseconds(self, direction: str, nbytes: int) -> int:
        """From the call until the host sees the end."""
        here, there = self._host[:nbytes], self._there[:nbytes]
        target, source = (here, there) if direction == "store" else (there, here)
        if self._driver is None:
            start = time.perf_counter_ns()
            target.copy_(source)
            return time.perf_counter_ns() - start
        to, of = (ctypes.c_uint64(tensor.data_ptr()) for tensor in (target, source))
        size = ctypes.c_size_t(nbytes)
        query = self._driver.cuEventQuery
        start = time.perf_counter_ns()
        copied = self._driver.cuMemcpyAsync(to, of, size, self._stream)
        recorded = self._driver.cuEventRecord(self._event, self._stream)
        while (state := query(self._event)) == _NOT_READY:
            pass
        seen = time.perf_counter_ns()
        _check(copied or recorded or state, "a big copy")
        return seen - start


_NOT_READY = 600


def _check(status: int, what: str) -> None:
    if status != 0:
        raise RuntimeError(f"{what} failed with CUDA error {status}")


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
