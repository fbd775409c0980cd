"""Submits very many small jobs that cannot move yet, and shows what each call and each job costs.

Every job moves one block. "held": the first job waits for an event, so all others are outstanding
while the caller's stream is idle. "busy": the caller's own stream is busy. poll() is called when
few jobs are outstanding, and when all are. Two rounds of each; the second one is judged. Without a
GPU nothing is held ("free"), and the jobs move meanwhile. All bytes are compared after each round.
The exit code is also 1 if a job is not reported as done once.
"""

from __future__ import annotations

import sys
import time
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # a checkout need not be installed

import torch
from blocks import ONE_TENSOR, NumberedBlocks
from program import device_of, finish, new_parser
from report import Column, Verdict, table_of
from timing import Hold, Nanoseconds, Spread, new_samples, no_garbage_collection, resident_bytes
from transfers import DIRECTIONS, Shape, submit

from torch_kvswap import OffloadHandler
from torch_kvswap.cli.progress import Progress

SHAPE = Shape(2, 8)
ROUNDS = 2
FEW, CALLS = 100, 1000  # jobs before the first calls of poll(); calls that are looked at
GROWTH, TAIL, BYTES = 1.5, 3.0, 512.0  # targets: all over few, p99 over median, of a job
# Less than any record of a job, so that one that stays behind is seen.
LEFT = 64
# Resident bytes that come and go: Python takes memory from the system 1 MiB at a time, and keeps a
# piece as long as anything lies in it.
NOISE = 2 << 20
_clock = time.perf_counter_ns


@dataclass(frozen=True)
class Run:
    """A round. Times of calls in microseconds. held: until all was submitted and poll() called.

    submit_few, submit_all: the first and the last 1,000 calls. poll_few, poll_all: with FEW and
    with all jobs outstanding. left_bytes: resident memory that the round left behind.
    not_done: jobs that were not reported as done exactly once. wrong: blocks and pages.
    """

    scenario: str
    direction: str
    number: int
    held: bool
    submit: Spread
    submit_few: Spread
    submit_all: Spread
    poll_few: Spread
    poll_all: Spread
    bytes_per_job: float
    left_bytes: int
    not_done: int
    wrong: int


COLUMNS: list[Column[Run]] = [
    Column("us", lambda run: run.scenario),
    Column("jobs", lambda run: run.direction),
    Column("round", lambda run: run.number),
    Column("submit, first", lambda run: run.submit_few.median),
    Column("last", lambda run: run.submit_all.median),
    Column("p99", lambda run: run.submit.p99),
    Column(f"poll, {FEW}", lambda run: run.poll_few.median if run.held else None),
    Column("all", lambda run: run.poll_all.median if run.held else None),
    Column("bytes/job", lambda run: run.bytes_per_job if run.held else None),
    Column("left, KiB", lambda run: run.left_bytes / 1024),
]


def main(arguments: list[str]) -> int:
    options = _parser().parse_args(arguments)
    device = device_of(options)
    count = options.jobs or (100_000 if device.type == "cuda" else 2_000)
    blocks = SHAPE.new_blocks(device, count, ONE_TENSOR)
    with OffloadHandler(blocks.layout, blocks.host) as handler:
        runs = measure_all(handler, blocks)
    verdicts = judge(runs, count)
    print(f"{count:,} jobs of one block of {blocks.layout.block_bytes / 1024:g} KiB\n")
    print(table_of(COLUMNS, runs), "", *verdicts, sep="\n")
    not_done = sum(run.not_done for run in runs)
    print(f"jobs not reported as done once: {not_done}")
    content = {
        "benchmark": "outstanding",
        "settings": {"jobs": count},
        "runs": list(map(asdict, runs)),
    }
    code = finish(options, content, verdicts, sum(run.wrong for run in runs))
    return 1 if not_done else code


def _parser() -> ArgumentParser:
    parser = new_parser(__doc__)
    text = "in a round; default: 100,000, on the CPU 2,000"
    parser.add_argument("--jobs", type=int, help=text)
    return parser


def measure_all(handler: Any, blocks: NumberedBlocks) -> list[Run]:
    scenarios: dict[str, Callable[[float], Hold] | None] = {"free": None}
    if blocks.device.type == "cuda":
        streams = torch.cuda.Stream(blocks.device), torch.cuda.current_stream(blocks.device)
        scenarios = {
            name: partial(Hold, stream)
            for name, stream in zip(("held", "busy"), streams, strict=True)
        }
    kinds = list(product(scenarios, DIRECTIONS, range(1, ROUNDS + 1)))
    progress = Progress("rounds", len(kinds), sys.stderr)
    runs = []
    for kind in kinds:
        runs.append(run_round(handler, blocks, scenarios[kind[0]], *kind))
        progress.advance(1)
    return runs


def run_round(
    handler: Any,
    blocks: NumberedBlocks,
    new_hold: Callable[[float], Hold] | None,
    scenario: str,
    direction: str,
    number: int,
) -> Run:
    """Submits a job for each block, and ends them."""
    ids = [torch.randperm(blocks.count) for _ in range(2)]
    jobs = [*zip(*(of_kind.view(-1, 1).tolist() for of_kind in ids), strict=True)]
    times, few, many = new_samples(len(jobs)), new_samples(CALLS), new_samples(CALLS)
    blocks.refill()
    with no_garbage_collection():
        memory = resident_bytes()
        hold = new_hold(0.5 + 25e-6 * len(jobs)) if new_hold else None  # a call takes about 10 us
        after = hold.event if hold and scenario == "held" else None
        _submit(handler, direction, jobs[:FEW], times[:FEW], after)
        results = _poll(handler, few)
        _submit(handler, direction, jobs[FEW:], times[FEW:])
        results += _poll(handler, many)
        full = resident_bytes()
        held = hold is not None and not hold.is_over and not results
        if hold:
            hold.wait()
        handler.synchronize()
        results += handler.poll()
        done = {result.job_id for result in results if result.ok}
        not_done = max(len(jobs), len(results)) - len(done)
        results.clear()
        del done
        left = resident_bytes() - memory
    blocks.note(direction, *ids)
    return Run(
        scenario,
        direction,
        number,
        held,
        submit=Spread.of(times),
        submit_few=Spread.of(times[:CALLS]),
        submit_all=Spread.of(times[-CALLS:]),
        poll_few=Spread.of(few),
        poll_all=Spread.of(many),
        bytes_per_job=(full - memory) / len(jobs),
        left_bytes=left,
        not_done=not_done,
        wrong=blocks.wrong(),
    )


def _submit(
    handler: Any,
    direction: str,
    jobs: Sequence[tuple[list[int], list[int]]],
    samples: Nanoseconds,
    after: Any = None,
) -> None:
    """Times each call. The first job waits for the event `after`, if there is one."""
    for number, (blocks, pages) in enumerate(jobs):
        start = _clock()
        submit(handler, direction, blocks, pages, after=after)
        samples[number] = _clock() - start
        after = None


def _poll(handler: Any, samples: Nanoseconds) -> list[Any]:
    results = []
    for number in range(len(samples)):
        start = _clock()
        ended = handler.poll()
        samples[number] = _clock() - start
        results += ended
    return results


def judge(runs: Sequence[Run], jobs: int) -> list[Verdict]:
    """The worst of all last rounds of so many jobs against each target."""
    last = [run for run in runs if run.number == ROUNDS]
    held = [run for run in last if run.held]
    over = [run for run in runs if run.scenario != "free" and not run.held]

    def worst(of: Sequence[Run], value: Callable[[Run], float]) -> float | None:
        return max(map(value, of), default=None)

    tail = worst(last, lambda run: run.submit.p99 / run.submit.median)
    submits = worst(held, lambda run: run.submit_all.median / run.submit_few.median)
    polls = worst(held, lambda run: run.poll_all.median / run.poll_few.median)
    size = worst(held, lambda run: run.bytes_per_job)
    # A first round may fill caches, which stay.
    left = worst(last, lambda run: run.left_bytes / jobs) if jobs * LEFT > NOISE else None
    return [
        Verdict("p99 of submit over its median", TAIL, tail),
        Verdict("rounds in which submitting was blocked", 0, len(over) if held or over else None),
        Verdict("median submit, last calls over first", GROWTH, submits),
        Verdict(f"median poll, all outstanding over {FEW}", GROWTH, polls),
        Verdict("resident bytes of an outstanding job", BYTES, size),
        Verdict("resident bytes that a second round leaves behind for each job", LEFT, left),
    ]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
