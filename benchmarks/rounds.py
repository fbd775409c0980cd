"""One round of many small jobs: submitted as fast as possible, held or not, then all ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from timing import Nanoseconds, Spread, new_samples, no_garbage_collection, resident_bytes

WINDOW = 1000  # calls that are looked at with few and with all outstanding
_BEFORE, _LOOKED_AT = 75, 50  # of a small round: it has 75 to 125 outstanding
_clock = time.perf_counter_ns

Job = tuple[Callable[..., Any], list[int], list[int]]  # handler.store or .load, GPU blocks, pages


class Held(Protocol):
    event: Any

    @property
    def is_over(self) -> bool: ...

    def wait(self) -> None: ...


@dataclass(frozen=True)
class Scenario:
    """hold: makes a stream busy for so many seconds; None holds nothing. by_event: the first job of
    each direction waits for its event; else it is the caller's stream that is busy."""

    name: str
    hold: Callable[[float], Held] | None = None
    by_event: bool = False


@dataclass(frozen=True)
class Few:
    """Calls with about 100 jobs outstanding, in microseconds."""

    submit: Spread
    poll: Spread


@dataclass(frozen=True)
class Round:
    """held: the hold lasted longer than the submission and the polls. outstanding: jobs when all
    were submitted. submit_all: the last 1,000 calls. poll: poll() when nothing had ended.
    collect_us: poll() per job when all had ended. added_bytes: resident memory that the round
    left behind. moving_seconds: from the first submission, or the end of the hold, to the last
    job's end. not_done: jobs that were not reported as done exactly once."""

    held: bool
    outstanding: int
    submit: Spread
    submit_all: Spread
    poll: Spread | None
    collect_us: float
    bytes_per_job: float | None
    added_bytes: int
    streams: int
    events: int
    jobs_per_transfer: float
    submit_seconds: float
    moving_seconds: float
    not_done: int


@dataclass(frozen=True)
class _Counts:
    outstanding: int
    done: int
    transfers: int
    streams: int
    events: int

    @classmethod
    def of(cls, handler: Any) -> _Counts:
        metrics = handler.metrics()
        channels = (metrics.stores, metrics.loads, metrics.expedited)
        return cls(
            sum(channel.queued + channel.running for channel in channels),
            sum(channel.done for channel in channels),
            sum(channel.transfers for channel in channels),
            sum(channel.streams for channel in channels),
            sum(channel.events for channel in channels),
        )


def _submit(
    jobs: Sequence[Job], event: Any, samples: Nanoseconds, kept: list[object] | None = None
) -> None:
    """Times each call. The first job of each direction waits for the event, if there is one."""
    waits = {} if event is None else {submit.__name__: event for submit, _, _ in jobs}
    for number, (submit, blocks, pages) in enumerate(jobs):
        after = waits.pop(submit.__name__, None) if waits else None
        start = _clock()
        job = submit(gpu_block_ids=blocks, page_ids=pages, after=after)
        samples[number] = _clock() - start
        if kept is not None:
            kept[number] = job


def _poll(handler: Any, samples: Nanoseconds) -> list[Any]:
    results = []
    for number in range(len(samples)):
        start = _clock()
        ended = handler.poll()
        samples[number] = _clock() - start
        results += ended
    return results


def run_few(handler: Any, jobs: Sequence[Job], scenario: Scenario) -> Few | None:
    """Small rounds until 1,000 calls are seen; None when a hold was over too early."""
    if scenario.hold is None:
        return None
    repeats = WINDOW // _LOOKED_AT
    submit, poll = (np.empty((repeats, _LOOKED_AT), np.int64) for _ in range(2))
    samples = new_samples(_BEFORE + _LOOKED_AT)
    held = True
    with no_garbage_collection():
        for number in range(repeats):
            hold = scenario.hold(0.05)
            event = hold.event if scenario.by_event else None
            _submit(jobs[: len(samples)], event, samples)
            submit[number] = samples[_BEFORE:]
            ended = _poll(handler, poll[number])
            held = held and not ended and not hold.is_over
            hold.wait()
            handler.synchronize()
            handler.poll()
    return Few(Spread.of(submit.ravel()), Spread.of(poll.ravel())) if held else None


def _collect(handler: Any, jobs: int, results: list[Any]) -> tuple[float, int]:
    """Of poll() when all has ended: microseconds per job. And the jobs that were not reported
    as done once, with the results that came before."""
    start = _clock()
    last = handler.poll()
    microseconds = (_clock() - start) / 1e3 / max(1, len(last))
    results += last
    done = {result.job_id for result in results if result.ok}
    not_done = max(jobs, len(results)) - len(done)
    results.clear()
    return microseconds, not_done


def run_round(
    handler: Any, jobs: Sequence[Job], scenario: Scenario, hold_seconds: float, keep: bool
) -> Round:
    """Submits all jobs and ends them. keep: whether the caller keeps the Job objects."""
    samples, poll = new_samples(len(jobs)), new_samples(WINDOW)
    kept: list[object] | None = [None] * len(jobs) if keep else None
    with no_garbage_collection():
        before, memory = _Counts.of(handler), resident_bytes()
        hold = scenario.hold(hold_seconds) if scenario.hold else None
        start = time.perf_counter()
        _submit(jobs, hold.event if hold and scenario.by_event else None, samples, kept)
        submitted = time.perf_counter()
        held = hold is not None and not hold.is_over
        results = _poll(handler, poll) if held else []
        full, full_memory = _Counts.of(handler), resident_bytes() if held else 0
        held = held and hold is not None and not hold.is_over and not results
        if hold:
            hold.wait()
        released = time.perf_counter() if hold else start
        handler.synchronize()
        ended = time.perf_counter()
        collect_us, not_done = _collect(handler, len(jobs), results)
        after, kept = _Counts.of(handler), None
        added = resident_bytes() - memory
    return Round(
        held=held,
        outstanding=full.outstanding,
        submit=Spread.of(samples),
        submit_all=Spread.of(samples[-WINDOW:]),
        poll=Spread.of(poll) if held else None,
        collect_us=collect_us,
        bytes_per_job=(full_memory - memory) / len(jobs) if held else None,
        added_bytes=added,
        streams=full.streams,
        events=max(full.events, after.events),
        jobs_per_transfer=(after.done - before.done) / max(1, after.transfers - before.transfers),
        submit_seconds=submitted - start,
        moving_seconds=ended - released,
        not_done=not_done,
    )
