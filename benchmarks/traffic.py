"""Transfers that go on and on, and how many bytes they have moved at any time."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from big_copy import BigCopy
from blocks import NumberedBlocks
from computes import Compute
from transfers import scattered, submit

IN_FLIGHT = 2
_LOOK_SECONDS = 50e-6  # between two looks: a loop would take the handler's lock from its thread


class Way(Protocol):
    """nbytes: of a transfer. start: begins one; what it returns says whether it has ended."""

    nbytes: int

    def start(self) -> Callable[[], bool]: ...


class BigWay:
    """One big pinned copy after another."""

    def __init__(self, big: BigCopy, direction: str, nbytes: int) -> None:
        self.nbytes = nbytes
        self._big = big
        self._direction = direction

    def start(self) -> Callable[[], bool]:
        self._big.enqueue(self._direction, self.nbytes)
        stream = self._big.stream(self._direction)
        if stream is None:
            return lambda: True
        event = torch.cuda.Event()
        event.record(stream)
        return lambda: bool(event.query())


class HandlerWay:
    """Scattered blocks through a handler. Two transfers in a row share no block and no page."""

    def __init__(self, handler: Any, blocks: NumberedBlocks, direction: str, count: int) -> None:
        self.nbytes = count * blocks.layout.block_bytes
        self.copy_methods: set[str] = set()
        self._handler = handler
        self._blocks = blocks
        self._direction = direction
        block_ids, page_ids = scattered(blocks, 2 * count)
        self._halves = list(zip(block_ids.split(count), page_ids.split(count), strict=True))
        self._number = 0

    def start(self) -> Callable[[], bool]:
        block_ids, page_ids = self._halves[self._number % 2]
        self._number += 1
        page_ids = page_ids.roll(self._number)  # else the bytes would be there already
        ids = block_ids.tolist(), page_ids.tolist()
        job = submit(self._handler, self._direction, *ids, after=())
        self._blocks.note(self._direction, block_ids, page_ids)
        return lambda: self._ended(job)

    def _ended(self, job: Any) -> bool:
        if not job.query():
            return False
        job.synchronize()  # raises if it failed
        self.copy_methods.add(job.result.copy_method)
        self._handler.poll()  # forgets the job
        return True


class Traffic:
    """Keeps two transfers going until it is stopped."""

    def __init__(self, way: Way) -> None:
        self._way = way
        self._times = [time.perf_counter()]
        self._bytes = [0]
        self._running = deque(way.start() for _ in range(IN_FLIGHT))

    def look(self) -> None:
        """Notes what has ended, and begins as many more."""
        for _ in range(IN_FLIGHT):
            if not self._note():
                return
            self._running.append(self._way.start())

    def stop(self, after: float) -> None:
        """Begins no more. Returns when all have ended, one of them after that time."""
        while self._times[-1] < after:
            self.look()
            time.sleep(_LOOK_SECONDS)
        while self._running:
            if not self._note():
                time.sleep(_LOOK_SECONDS)

    def moved(self, start: float, end: float) -> float:
        """Bytes between two times of time.perf_counter()."""
        landed = np.interp([start, end], self._times, self._bytes)
        return float(landed[1] - landed[0])

    def _note(self) -> bool:
        if not self._running[0]():
            return False
        self._running.popleft()
        self._times.append(time.perf_counter())
        self._bytes.append(self._bytes[-1] + self._way.nbytes)
        return True


def beside(compute: Compute, way: Way | None) -> tuple[float, float, float]:
    """Milliseconds that the compute took, GB that moved meanwhile and GB/s. way: None for none."""
    traffic = Traffic(way) if way else None
    start = time.perf_counter()
    run = compute.start()
    while not run.is_over():
        if traffic:
            traffic.look()
        time.sleep(_LOOK_SECONDS)
    end = time.perf_counter()
    milliseconds = run.milliseconds()
    if traffic is None:
        return milliseconds, 0.0, 0.0
    traffic.stop(end)
    gigabytes = traffic.moved(start, end) / 1e9
    return milliseconds, gigabytes, gigabytes / (end - start)
