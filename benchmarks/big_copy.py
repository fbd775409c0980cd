"""What everything is compared with: one big copy between the device and pinned memory."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_NOT_READY = 600


@dataclass(frozen=True)
class _Way:
    """One direction: its memory, its stream and its event."""

    source: Tensor
    target: Tensor
    stream: Any
    event: ctypes.c_void_p

    def arguments(self, nbytes: int) -> tuple[ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t]:
        assert nbytes <= len(self.target)
        to, of = (ctypes.c_uint64(tensor.data_ptr()) for tensor in (self.target, self.source))
        return to, of, ctypes.c_size_t(nbytes)


class BigCopy:
    """A copy each way of up to nbytes, in memory and on a stream of its own, whose event the host
    looks at in a loop.

    Calls the driver itself: PyTorch would add several microseconds. Without a GPU, PyTorch's copy.
    """

    def __init__(self, device: torch.device, nbytes: int, driver: Any = None) -> None:
        self._driver = driver or (ctypes.CDLL("libcuda.so.1") if device.type == "cuda" else None)
        self._ways = {
            direction: self._new_way(device, nbytes, direction) for direction in ("store", "load")
        }

    def _new_way(self, device: torch.device, nbytes: int, direction: str) -> _Way:
        on_cuda = device.type == "cuda"
        there = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        here = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=on_cuda)
        source, target = (there, here) if direction == "store" else (here, there)
        event = ctypes.c_void_p()
        if self._driver is not None:
            untimed = 2
            _check(self._driver.cuEventCreate(ctypes.byref(event), untimed), "cuEventCreate")
        return _Way(source, target, torch.cuda.Stream(device) if on_cuda else None, event)

    def stream(self, direction: str) -> Any:
        """Where its copies run; None without a GPU."""
        return self._ways[direction].stream

    def enqueue(self, direction: str, nbytes: int) -> None:
        """Waits for nothing on a GPU, and copies at once without one."""
        way = self._ways[direction]
        if self._driver is None:
            way.target[:nbytes].copy_(way.source[:nbytes])
            return
        copied = self._driver.cuMemcpyAsync(*way.arguments(nbytes), _handle(way.stream))
        _check(copied, "a big copy")

    def give(self, directions: Sequence[str], nbytes: int) -> None:
        """A copy each way at once, in the order of the current stream. On a GPU only."""
        current = torch.cuda.current_stream()
        for direction in directions:
            self.stream(direction).wait_stream(current)
            self.enqueue(direction, nbytes)
        for direction in directions:
            current.wait_stream(self.stream(direction))

    def nanoseconds(self, directions: Sequence[str], nbytes: int) -> int:
        """From the call until the host sees the end of nbytes each way at once."""
        ways = [self._ways[direction] for direction in directions]
        if self._driver is None:
            start = time.perf_counter_ns()
            for way in ways:
                way.target[:nbytes].copy_(way.source[:nbytes])
            return time.perf_counter_ns() - start
        calls = [(way.arguments(nbytes), _handle(way.stream), way.event) for way in ways]
        copy, record = self._driver.cuMemcpyAsync, self._driver.cuEventRecord
        query, status = self._driver.cuEventQuery, 0
        start = time.perf_counter_ns()
        for arguments, stream, event in calls:
            status = status or copy(*arguments, stream) or record(event, stream)
        for _, _, event in calls:
            while (state := query(event)) == _NOT_READY:
                pass
            status = status or state
        seen = time.perf_counter_ns()
        _check(status, "a big copy")
        return seen - start


def _handle(stream: Any) -> ctypes.c_void_p:
    return ctypes.c_void_p(getattr(stream, "cuda_stream", None))


def _check(status: int, what: str) -> None:
    if status != 0:
        raise RuntimeError(f"{what} failed with CUDA error {status}")
