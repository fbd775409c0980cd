"""The benchmark of many outstanding jobs: it counts them right, and notices wrong bytes and lost
jobs.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import outstanding
import pytest
import torch
from blocks import NumberedBlocks
from outstanding_report import Run, judge
from report import Verdict
from rounds import Few, Round, Scenario, run_few
from timing import Spread

pytestmark = pytest.mark.slow  # of a benchmark program

COUNT = 1100


class FakeHandler:
    """Moves nothing before it is waited for."""

    def __init__(self, blocks: NumberedBlocks) -> None:
        self.blocks = blocks
        self.afters: list[object] = []
        self.pending: list[tuple[str, int, int]] = []
        self.ended: list[SimpleNamespace] = []
        self.done = 0
        self.spoil = lambda number: False  # which jobs move nothing
        self.lose = lambda number: False  # which jobs are never reported

    def store(self, *, gpu_block_ids: list[int], page_ids: list[int], after: object) -> None:
        self.afters.append(after)
        self.pending.append(("store", gpu_block_ids[0], page_ids[0]))

    def load(self, *, page_ids: list[int], gpu_block_ids: list[int], after: object) -> None:
        self.afters.append(after)
        self.pending.append(("load", gpu_block_ids[0], page_ids[0]))

    def poll(self) -> list[SimpleNamespace]:
        ended, self.ended = self.ended, []
        return ended

    def synchronize(self) -> None:
        for number, (direction, block, page) in enumerate(self.pending):
            self.done += 1
            if not self.spoil(number):
                self._move(direction, block, self.blocks.host.pages[page, 0])
            if not self.lose(number):
                self.ended.append(SimpleNamespace(job_id=self.done, ok=True))
        self.pending.clear()

    def metrics(self) -> SimpleNamespace:
        queued, idle = len(self.pending), SimpleNamespace(queued=0, running=0, done=0, transfers=0)
        idle.streams, idle.events = 1, 2
        busy = SimpleNamespace(queued=queued, running=0, done=self.done, transfers=self.done // 4)
        busy.streams, busy.events = 2, 5
        return SimpleNamespace(stores=busy, loads=idle, expedited=idle)

    def _move(self, direction: str, block: int, page: torch.Tensor) -> None:
        for tensor, part in zip(
            self.blocks.layout.tensors, page.view(torch.int64).split(2), strict=True
        ):
            source, target = (
                (tensor[block], part) if direction == "store" else (part, tensor[block])
            )
            target.copy_(source)


class FakeHold:
    def __init__(self, is_over: bool = False) -> None:
        self.event = object()
        self.is_over = is_over

    def wait(self) -> None:
        self.is_over = True


@pytest.fixture
def blocks() -> NumberedBlocks:
    return NumberedBlocks(torch.device("cpu"), COUNT, layers=2, fragment_bytes=16)


def runs_of(handler: Any, scenario: Scenario, direction: str) -> list[Run]:
    return list(outstanding.measure(handler, handler.blocks, scenario, direction, 1.0))


# Rounds


@pytest.mark.parametrize("direction", ["store", "load", "both"])
def test_held_jobs_are_all_outstanding_and_end_with_the_right_bytes(
    direction: str, blocks: NumberedBlocks
) -> None:
    runs = runs_of(FakeHandler(blocks), Scenario("held", lambda _: FakeHold(), True), direction)
    assert [(run.number, run.kept) for run in runs] == [(1, False), (2, False), (3, True)]
    for run in runs:
        assert (run.round.held, run.round.outstanding) == (True, COUNT)
        assert (run.round.streams, run.round.events) == (4, 9)
        assert run.round.jobs_per_transfer == pytest.approx(4, rel=0.01)
        assert run.round.poll is not None
        assert run.few is not None
        assert (run.wrong, run.round.not_done) == (0, 0)


def test_only_the_first_job_of_a_direction_waits_for_the_event(blocks: NumberedBlocks) -> None:
    handler, hold = FakeHandler(blocks), FakeHold()
    jobs = [(handler.store, [0], [0]), (handler.load, [1], [1])] * 100
    few = run_few(handler, jobs, Scenario("held", lambda _: hold, True))
    assert few is None  # the hold stays over after the first time
    assert handler.afters == ([hold.event] * 2 + [None] * 123) * 20


def test_a_busy_stream_is_not_named(blocks: NumberedBlocks) -> None:
    handler = FakeHandler(blocks)
    runs = runs_of(handler, Scenario("busy", lambda _: FakeHold()), "store")
    assert len(runs) == 2
    assert {*handler.afters} == {None}


def test_a_hold_that_is_over_too_early_is_tried_longer_and_then_told(
    blocks: NumberedBlocks,
) -> None:
    seconds: list[float] = []

    def hold(length: float) -> FakeHold:
        seconds.append(length)
        return FakeHold(is_over=length > 0.05)

    runs = runs_of(FakeHandler(blocks), Scenario("busy", hold), "store")
    assert [run.round.held for run in runs] == [False, False]
    assert [run.round.bytes_per_job for run in runs] == [None, None]
    long = [length for length in seconds if length > 0.05]
    assert long[1] == 4 * long[0]
    assert len(long) == 4


def test_a_copy_that_is_left_out_is_seen(blocks: NumberedBlocks) -> None:
    handler = FakeHandler(blocks)
    handler.spoil = lambda number: number == 1007
    for direction in ("store", "load", "both"):
        assert [run.wrong for run in runs_of(handler, Scenario("free"), direction)] == [1, 1]


def test_a_job_that_is_not_reported_is_seen(blocks: NumberedBlocks) -> None:
    handler = FakeHandler(blocks)
    handler.lose = lambda number: number in (3, 1007)
    assert [run.round.not_done for run in runs_of(handler, Scenario("free"), "load")] == [2, 2]


def test_a_job_that_is_reported_twice_is_seen(blocks: NumberedBlocks) -> None:
    handler = FakeHandler(blocks)
    synchronize = handler.synchronize

    def report_twice() -> None:
        synchronize()
        handler.ended.append(handler.ended[0])

    handler.synchronize = report_twice  # type: ignore[method-assign]
    assert [run.round.not_done for run in runs_of(handler, Scenario("free"), "load")] == [1, 1]


# Bytes


def test_a_byte_that_changes_where_no_job_went_is_seen(blocks: NumberedBlocks) -> None:
    assert blocks.wrong() == 0
    blocks.host.pages[COUNT - 1, 0, 31] ^= 1
    blocks.layout.tensors[1][COUNT - 1, 1] += 1
    assert blocks.wrong() == 2


def test_what_an_earlier_round_left_behind_is_wrong(blocks: NumberedBlocks) -> None:
    ids = torch.arange(COUNT)
    pages = blocks.host.pages
    for tensor, part in zip(
        blocks.layout.tensors, pages.view(torch.int64).split(2, -1), strict=True
    ):
        part.squeeze(1).copy_(tensor)
    blocks.note("store", ids, ids)
    assert blocks.wrong() == 0
    kept = pages.clone()
    blocks.refill()
    pages.copy_(kept)
    blocks.note("store", ids, ids)
    assert blocks.wrong() == COUNT


def test_no_two_words_are_the_same(blocks: NumberedBlocks) -> None:
    words = torch.cat([*blocks.layout.tensors, blocks.host.pages.view(torch.int64).squeeze(1)], 1)
    assert len(words.unique()) == words.numel()


# What is said


def a_run(
    scenario: str,
    number: int,
    held: bool = True,
    few: bool = True,
    events: int = 9,
    p99: float = 8,
    added_bytes: int = 4096,
) -> Run:
    fast, slow = (Spread(median, median, 2 * median, p99, 9, 10) for median in (2.0, 4.0))
    ended = Round(
        held=held,
        outstanding=1000,
        submit=slow,
        submit_all=slow,
        poll=fast if held else None,
        collect_us=0.5,
        bytes_per_job=480.0 if held else None,
        added_bytes=added_bytes,
        streams=4,
        events=events,
        jobs_per_transfer=4.0,
        submit_seconds=0.01,
        moving_seconds=0.1,
        not_done=0,
    )
    return Run(scenario, "store", number, False, Few(fast, fast) if few else None, ended, 1, 2, 0)


def of_name(verdicts: Sequence[Verdict], name: str) -> Verdict:
    [found] = [verdict for verdict in verdicts if name in verdict.name]
    return found


def test_a_record_that_stays_behind_for_each_job_is_seen_and_memory_of_python_is_not() -> None:
    def left(added_bytes: int, jobs: int) -> Verdict:
        runs = [a_run("busy", 1), a_run("busy", 2, added_bytes=added_bytes), a_run("busy", 2)]
        return of_name(judge(runs, jobs), "leaves behind")

    assert left(2_105_344, 50_000).met is True
    assert left(72 * 50_000, 50_000).met is False
    assert left(0, 2_000).met is None  # so few jobs that memory of Python would decide
