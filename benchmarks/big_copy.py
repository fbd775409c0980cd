"""What everything is compared with: one big copy to or from pinned memory, also by PyTorch."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from timing import Move
from torch import Tensor

Before = Callable[[], object]  # what is done right before the clock starts


def nothing() -> None:
    """A Before that leaves all as it is."""


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

    def __init__(self, device: torch.device, nbytes: int) -> None:
        self._driver = ctypes.CDLL("libcuda.so.1") if device.type == "cuda" else None
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

    def tensors(self, direction: str, nbytes: int) -> tuple[Tensor, Tensor]:
        """The first nbytes of what it copies from, and of what it copies to."""
        way = self._ways[direction]
        return way.source[:nbytes], way.target[:nbytes]

    def move(self, directions: Sequence[str], nbytes: int, before: Before = nothing) -> Move:
        """Copies nbytes each way at once, and waits until the host sees the end."""
        if self._driver is None:
            return _copied_at_once(self, directions, nbytes, before)
        ways = [self._ways[direction] for direction in directions]
        calls = [(way.arguments(nbytes), _handle(way.stream), way.event) for way in ways]
        copy, record = self._driver.cuMemcpyAsync, self._driver.cuEventRecord
        query, status = self._driver.cuEventQuery, 0
        before()
        start = time.perf_counter_ns()
        for arguments, stream, event in calls:
            status = status or copy(*arguments, stream) or record(event, stream)
        submitted = time.perf_counter_ns()
        for _, _, event in calls:
            while (state := query(event)) == _NOT_READY:
                pass
            status = status or state
        seen = time.perf_counter_ns()
        _check(status, "a big copy")
        return Move((seen - start) / 1e3, (submitted - start) / 1e3)


class Reference:
    """What PyTorch needs for one contiguous copy that gives the guarantees of a transfer.

    An event on the current stream, for which a copy stream waits; on that stream an event, the
    copy and an event; then the host waits for the last one. It copies the memory of a big copy.
    Without a GPU a copy is all.
    """

    def __init__(self, big: BigCopy, device: torch.device) -> None:
        self._big = big
        self._on_cuda = device.type == "cuda"
        if self._on_cuda:
            directions = ("store", "load")
            self._streams = {direction: torch.cuda.Stream(device) for direction in directions}
            self._events = {
                direction: _new_events() for direction in directions
            }  # as an engine does

    def move(self, directions: Sequence[str], nbytes: int, before: Before = nothing) -> Move:
        """Copies nbytes each way at once, and waits until the host sees the end."""
        if not self._on_cuda:
            return _copied_at_once(self._big, directions, nbytes, before)
        copies = [(direction, *self._big.tensors(direction, nbytes)) for direction in directions]
        before()
        start = time.perf_counter_ns()
        ends = [self._submit(*copy) for copy in copies]
        submitted = time.perf_counter_ns()
        for end in ends:
            end.synchronize()
        seen = time.perf_counter_ns()
        return Move((seen - start) / 1e3, (submitted - start) / 1e3)

    def _submit(self, direction: str, source: Tensor, target: Tensor) -> torch.cuda.Event:
        stream, (ready, start, end) = self._streams[direction], self._events[direction]
        ready.record()  # on the current stream
        stream.wait_event(ready)
        start.record(stream)
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        end.record(stream)
        return end


def _new_events() -> tuple[torch.cuda.Event, torch.cuda.Event, torch.cuda.Event]:
    """Before the copy may start; its start and its end, which have times."""
    event: Any = torch.cuda.Event  # it has no types
    return event(), event(enable_timing=True), event(enable_timing=True)


def _copied_at_once(big: BigCopy, directions: Sequence[str], nbytes: int, before: Before) -> Move:
    copies = [big.tensors(direction, nbytes) for direction in directions]
    before()
    start = time.perf_counter_ns()
    for source, target in copies:
        target.copy_(source)
    took = (time.perf_counter_ns() - start) / 1e3
    return Move(took, took)


def _handle(stream: Any) -> ctypes.c_void_p:
    return ctypes.c_void_p(getattr(stream, "cuda_stream", None))


def _check(status: int, what: str) -> None:
    if status != 0:
        raise RuntimeError(f"{what} failed with CUDA error {status}")
