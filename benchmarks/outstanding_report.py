"""What the rounds of many small jobs come to: two tables, and the targets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from report import Column, Verdict, table_of
from rounds import Few, Round
from timing import Spread

# Less than any record of a job, so that one that stays behind is seen.
LEFT_PER_JOB = 64
# Resident bytes that come and go: Python takes memory from the system 1 MiB at a time, and keeps a
# piece as long as anything lies in it.
NOISE = 2 << 20


@dataclass(frozen=True)
class Run:
    scenario: str
    direction: str
    number: int
    kept: bool  # whether the caller kept the Job objects
    few: Few | None  # the same calls with about 100 jobs outstanding
    round: Round
    gb_per_s: float
    big_copy_gb_per_s: float
    wrong: int  # blocks and pages


def _kind(title: str) -> list[Column[Run]]:
    return [
        Column(title, lambda run: run.scenario),
        Column("jobs", lambda run: run.direction),
        Column("round", lambda run: f"{run.number}, Jobs kept" if run.kept else str(run.number)),
    ]


SUBMITS: list[Column[Run]] = [
    *_kind("submit, us"),
    Column("median", lambda run: run.round.submit.median),
    Column("mean", lambda run: run.round.submit.mean),
    Column("p90", lambda run: run.round.submit.p90),
    Column("p99", lambda run: run.round.submit.p99),
    Column("p99.9", lambda run: run.round.submit.p999),
    Column("max", lambda run: run.round.submit.max),
    Column("p99/median", lambda run: run.round.submit.p99 / run.round.submit.median),
    Column("submit, s", lambda run: run.round.submit_seconds),
]
# With few (100) and with all jobs outstanding.
OUTSTANDING: list[Column[Run]] = [
    *_kind("outstanding, us"),
    Column("submit, 100", lambda run: run.few and run.few.submit.median),
    Column("mean", lambda run: run.few and run.few.submit.mean),
    Column("submit, all", lambda run: run.round.submit_all.median),
    Column("mean", lambda run: run.round.submit_all.mean),
    Column("poll, 100", lambda run: run.few and run.few.poll.median),
    Column("mean", lambda run: run.few and run.few.poll.mean),
    Column("poll, all", lambda run: run.round.poll and run.round.poll.median),
    Column("mean", lambda run: run.round.poll and run.round.poll.mean),
    Column("collect, us/job", lambda run: run.round.collect_us),
]
MOVING: list[Column[Run]] = [
    *_kind("moving"),
    Column("outstanding", lambda run: run.round.outstanding),
    Column("bytes/job", lambda run: run.round.bytes_per_job),
    Column("left, KiB", lambda run: run.round.added_bytes / 1024),
    Column("streams", lambda run: run.round.streams),
    Column("events", lambda run: run.round.events),
    Column("jobs/transfer", lambda run: run.round.jobs_per_transfer),
    Column("s", lambda run: run.round.moving_seconds),
    Column("GB/s", lambda run: run.gb_per_s),
    Column("big copy, GB/s", lambda run: run.big_copy_gb_per_s),
    Column("of it", lambda run: run.gb_per_s / run.big_copy_gb_per_s),
]


def tables(runs: Sequence[Run]) -> str:
    return "\n\n".join(table_of(columns, runs) for columns in (SUBMITS, OUTSTANDING, MOVING))


def judge(runs: Sequence[Run], jobs: int) -> list[Verdict]:
    """The worst of all runs of so many jobs against each target. Times are medians of the rounds of
    a kind first, because the machine is slower at times."""

    def worst(values: Iterator[float | None]) -> float | None:
        return max((value for value in values if value is not None), default=None)

    holding = [run for run in runs if run.scenario != "free"]
    polled = [run for run in runs if run.few and run.round.poll]
    blocked = [float(not run.round.held) for run in holding]
    # The memory that one round leaves behind may be of caches that are filled once.
    left = (run.round.added_bytes / jobs for run in runs if run.number == 2)
    return [
        *(
            Verdict(f"p99 of submit over its median, {name}", 3, worst(_tails(runs, name)))
            for name in ("held", "busy", "free")
        ),
        Verdict("rounds in which submitting was blocked", 0, sum(blocked) if blocked else None),
        Verdict("median submit, all outstanding over 100", 1.5, worst(_growths(polled, "submit"))),
        Verdict("median poll, all outstanding over 100", 1.5, worst(_growths(polled, "poll"))),
        Verdict(
            "resident bytes of an outstanding job",
            512,
            worst(run.round.bytes_per_job for run in holding if not run.kept),
        ),
        Verdict("streams", 16, worst(float(run.round.streams) for run in runs)),
        Verdict("events", 1200, worst(float(run.round.events) for run in runs)),
        Verdict(
            "resident bytes that a second round leaves behind for each job",
            LEFT_PER_JOB,
            worst(left) if jobs * LEFT_PER_JOB > NOISE else None,
        ),
        Verdict("streams and events that a second round adds", 0, worst(_added(runs))),
        Verdict("blocks and pages with wrong bytes", 0, sum(run.wrong for run in runs)),
        Verdict("jobs not reported as done once", 0, sum(run.round.not_done for run in runs)),
    ]


def _tails(runs: Sequence[Run], scenario: str) -> Iterator[float]:
    def ratio(run: Run) -> float:
        return run.round.submit.p99 / run.round.submit.median

    return _medians([run for run in runs if run.scenario == scenario], ratio)


def _growths(runs: Sequence[Run], call: str) -> Iterator[float]:
    def ratio(run: Run) -> float:
        assert run.few
        assert run.round.poll
        many = run.round.submit_all if call == "submit" else run.round.poll
        few: Spread = getattr(run.few, call)
        return many.median / few.median

    return _medians(runs, ratio)


def _medians(runs: Sequence[Run], ratio: Callable[[Run], float]) -> Iterator[float]:
    """Of the rounds of each scenario and direction."""
    kinds: dict[tuple[str, str], list[float]] = {}
    for run in runs:
        kinds.setdefault((run.scenario, run.direction), []).append(ratio(run))
    return (median(ratios) for ratios in kinds.values())


def _added(runs: Sequence[Run]) -> Iterator[float]:
    for first, second in pairwise(runs):
        if second.number == 2:
            before = first.round.streams + first.round.events
            yield float(second.round.streams + second.round.events - before)
