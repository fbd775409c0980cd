"""Submits very many small jobs that cannot move yet, and shows what each call and each job costs.

Every job moves one block. "held": the first job waits for an event, so all others are outstanding
while the caller's stream is idle. "busy": the caller's own stream is busy. "free": nothing is held,
the jobs move meanwhile. Without a GPU only "free" runs. All bytes are compared after each round.
Ends with 1 when bytes are wrong or a job is not reported as done once, else with 0, whether or not
the targets are met.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # a checkout need not be installed

import torch
from big_copy import BigCopy
from blocks import ONE_TENSOR, NumberedBlocks
from outstanding_report import Run, judge, tables
from program import device_of, new_parser
from report import write_json
from rounds import WINDOW, Few, Job, Round, Scenario, run_few, run_round
from timing import Hold

from torch_kvswap import OffloadHandler
from torch_kvswap.cli.progress import Progress

DIRECTIONS = ("store", "load", "both")  # both: a store and a load in turn


def main(arguments: list[str]) -> int:
    options = _parser().parse_args(arguments)
    device = device_of(options)
    count = options.jobs or (100_000 if device.type == "cuda" else 2_000)
    layers, fragment_bytes = options.layers, options.fragment_kib * 1024
    blocks = NumberedBlocks(device, count, layers, fragment_bytes, ONE_TENSOR)
    big = big_copy_seconds(device, blocks.host.nbytes)
    with OffloadHandler(blocks.layout, blocks.host) as handler:
        runs = measure_all(handler, blocks, scenarios(device), big)
    verdicts = judge(runs, count)
    print(f"{count:,} jobs of one block of {blocks.layout.block_bytes / 1024:g} KiB\n")
    print(tables(runs), "", *verdicts, sep="\n")
    if options.json:
        settings = {"jobs": count, "layers": options.layers, "fragment_kib": options.fragment_kib}
        content = {
            "benchmark": "outstanding",
            "settings": settings,
            "runs": list(map(asdict, runs)),
        }
        write_json(options.json, device, content, verdicts)
    return 1 if any(run.wrong or run.round.not_done for run in runs) else 0


def _parser() -> ArgumentParser:
    parser = new_parser(__doc__)
    add = parser.add_argument
    add("--jobs", type=int, help="in a round; default: 100,000, on the CPU 2,000")
    add("--layers", type=int, default=2, help="tensors of the cache")
    add("--fragment-kib", type=int, default=8, help="of a block in one layer")
    return parser


def big_copy_seconds(device: torch.device, nbytes: int) -> dict[str, float]:
    """Of that many bytes one way, or half of them each way at once; the median of five."""
    big = BigCopy(device, nbytes)
    seconds = {}
    for direction in DIRECTIONS:
        ways = ["store", "load"] if direction == "both" else [direction]
        samples = [big.move(ways, nbytes // len(ways)).total_us for _ in range(6)]
        seconds[direction] = median(samples[1:]) / 1e6  # the first one touches the memory
    return seconds


def scenarios(device: torch.device) -> list[Scenario]:
    if device.type != "cuda":
        return [Scenario("free")]
    side = torch.cuda.Stream(device)
    return [
        Scenario("held", lambda seconds: Hold(side, seconds), by_event=True),
        Scenario("busy", lambda seconds: Hold(torch.cuda.current_stream(device), seconds)),
        Scenario("free"),
    ]


def measure_all(
    handler: Any, blocks: NumberedBlocks, scenarios: Sequence[Scenario], big: Mapping[str, float]
) -> list[Run]:
    """big: seconds of one big copy of all bytes, by direction."""
    total = len(DIRECTIONS) * sum(map(_rounds, scenarios))
    progress = Progress("rounds", total, sys.stderr)
    runs = []
    for scenario, direction in product(scenarios, DIRECTIONS):
        for run in measure(handler, blocks, scenario, direction, big[direction]):
            runs.append(run)
            progress.advance(1)
    return runs


def measure(
    handler: Any, blocks: NumberedBlocks, scenario: Scenario, direction: str, big_seconds: float
) -> Iterator[Run]:
    """Two rounds, and where jobs are held by an event a third one whose Job objects are kept."""
    block_ids, page_ids = (torch.randperm(blocks.count) for _ in range(2))
    jobs = list(_jobs(handler, direction, block_ids.tolist(), page_ids.tolist()))
    few = run_few(handler, jobs, scenario)
    nbytes = blocks.count * blocks.layout.block_bytes
    for number in range(1, _rounds(scenario) + 1):
        blocks.refill()
        kept = number == 3
        ended = _run_held(handler, jobs, scenario, few, kept)
        stores = slice(0, None, 2) if direction == "both" else slice(None)
        loads = slice(1, None, 2) if direction == "both" else slice(None)
        if direction != "load":
            blocks.note("store", block_ids[stores], page_ids[stores])
        if direction != "store":
            blocks.note("load", block_ids[loads], page_ids[loads])
        speeds = (nbytes / ended.moving_seconds / 1e9, nbytes / big_seconds / 1e9)
        yield Run(scenario.name, direction, number, kept, few, ended, *speeds, wrong=blocks.wrong())


def _jobs(handler: Any, direction: str, blocks: list[int], pages: list[int]) -> Iterator[Job]:
    for number, (block, page) in enumerate(zip(blocks, pages, strict=True)):
        if direction == "store" or (direction == "both" and number % 2 == 0):
            yield handler.store, [block], [page]
        else:
            yield handler.load, [block], [page]


def _run_held(
    handler: Any, jobs: Sequence[Job], scenario: Scenario, few: Few | None, keep: bool
) -> Round:
    """A round that is held long enough. A hold that is over although it was long has blocked the
    submission, and says so in the round."""
    call = few.submit.mean + few.poll.mean if few else 20.0
    seconds = 0.5 + 2e-6 * call * (len(jobs) + WINDOW)
    ended = run_round(handler, jobs, scenario, seconds, keep)
    if scenario.hold and not ended.held and ended.submit.max < 0.5e6 * seconds:
        ended = run_round(handler, jobs, scenario, 4 * seconds, keep)
    return ended


def _rounds(scenario: Scenario) -> int:
    return 3 if scenario.by_event else 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
