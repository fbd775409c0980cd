"""A transfer: what one copy holds while it runs, and how it ended."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch_kvswap.device import Device, Event, Stream
from torch_kvswap.pool import Pool

Direction = Literal["store", "load"]
Copy = Callable[[], None]  # enqueues a copy on the current stream


@dataclass(frozen=True)
class Result:
    """How a job ended.

    nbytes: what it was to copy. seconds: the copy on the device without the waits before it, 0 for
    a failed job. submit_seconds: host time in the call that submitted it. path: the way of copying,
    "batch" (copy engine, in one driver call or in one per fragment where doctor says so) or "host"
    (memcpy). error: why it failed; None when it is ok.
    """

    job_id: int
    direction: Direction
    ok: bool
    nbytes: int
    seconds: float
    submit_seconds: float
    path: str
    error: BaseException | None


class TransferError(RuntimeError):
    """Jobs that were asked for have failed. results: theirs, each with its error."""

    def __init__(self, results: list[Result]) -> None:
        self.results = results
        super().__init__(
            "; ".join(
                f"{r.direction} {r.job_id} failed: {type(r.error).__name__}: {r.error}"
                for r in results
            )
        )


@dataclass(eq=False)
class Transfer:
    """One copy, with the stream and the events that it holds until it has ended."""

    id: int
    direction: Direction
    nbytes: int
    path: str
    submit_seconds: float = 0.0
    stream: Any = None
    ready: Any = None  # the event of what the copy waits for, recorded inside submit
    start: Any = None  # the event behind the waits
    end: Any = None  # the event behind the copy
    waiters: int = 0  # threads that block on `end`
    result: Result | None = None  # None while it runs

    def take(self, stream: Stream, events: Pool[Event]) -> None:
        """What it needs to run."""
        self.stream = stream
        self.start = events.take()
        self.end = events.take()
        self.ready = events.take()

    def enqueue(self, device: Device, copy: Copy, after: Stream | None, waits: list[Event]) -> None:
        """Copies behind all that `after` was given so far and behind the events."""
        if after is not None:
            self.ready.record(after)
            self.ready.wait(self.stream)
        for event in waits:
            event.wait(self.stream)
        self.start.record(self.stream)
        with device.current(self.stream):
            copy()
        self.end.record(self.stream)

    def finish(self, seconds: float, error: BaseException | None) -> None:
        self.result = Result(
            job_id=self.id,
            direction=self.direction,
            ok=error is None,
            nbytes=self.nbytes,
            seconds=seconds,
            submit_seconds=self.submit_seconds,
            path=self.path,
            error=error,
        )

    def block(self, deadline: float | None) -> None:
        """Blocks the host until it has ended or time.monotonic() has passed the deadline."""
        if deadline is None:
            self.end.synchronize()
            return
        pause = 20e-6  # CUDA waits for an event for ever or not at all
        while not self.end.query() and (left := deadline - time.monotonic()) > 0:
            time.sleep(min(pause, left))
            pause = min(2 * pause, 1e-3)

    def release(self, events: Pool[Event]) -> None:
        """Gives back what it holds, and forgets it: the events will stand for another one."""
        for event in (self.ready, self.start, self.end):
            if event is not None:
                events.give(event)
        self.stream = self.ready = self.start = self.end = None
