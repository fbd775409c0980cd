"""Times the calls of store() and load() alone, by blocks and by layers, and expand_block_ids.

Beside them the calls of one big copy of the same bytes, and of the reference R: what PyTorch needs
for one contiguous copy with the guarantees of a transfer. All three in turn, as in bandwidth.py.
"held": the caller's stream is busy, so the transfer begins only after the call. "warm": nothing is
held, each call comes when all before it has ended. "cold": as that, and before each of the three,
host memory is read and PyTorch is called. Without a GPU nothing is held, the calls copy too, and
nothing of them is judged. The ids are other random ones, as lists, in every call; all bytes are
compared after each cell.

expand_block_ids writes 1 M ids on the CPU into memory that has been written before, beside a
memcpy of as many bytes into such memory, in turn.

Ends with 1 when bytes are wrong, else with 0, whether or not the targets are met.
"""

from __future__ import annotations

import ctypes
import sys
import time
from argparse import ArgumentParser
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # a checkout need not be installed

import torch
from comparison import COLD, HELD, WARM, Plan, add_comparison, measure_all, settings
from program import device_of, finish, is_judged, new_parser
from submit_cost_report import (
    Expansion,
    expansion_table,
    judge_calls,
    judge_expansions,
    tables,
)
from timing import Spread, new_samples, no_garbage_collection
from transfers import DIRECTIONS, blocks_of, shapes_of

from torch_kvswap import expand_block_ids

SHAPES = ("1x8", "160x8")
FACTORS = (4, 16, 64)  # small blocks in a large one
OUTPUTS = 1_000_000
WARM_UPS = 3


def main(arguments: list[str]) -> int:
    options = _parser().parse_args(arguments)
    device = device_of(options)
    on_cuda = device.type == "cuda"
    blocks = blocks_of(options, on_cuda, on_cpu=3)
    states = (WARM, HELD, COLD) if on_cuda else (WARM, COLD)
    shapes = shapes_of(options, on_cuda, SHAPES)
    plan = Plan(shapes, DIRECTIONS, sorted(set(blocks)), states)
    cells = measure_all(plan, device, options, "calls")
    expansions = [expand(OUTPUTS, factor, options.samples) for factor in FACTORS]
    verdicts = [*(judge_calls(cells) if is_judged(device) else []), *judge_expansions(expansions)]
    print(tables(cells), "", expansion_table(expansions), "", *verdicts, "", sep="\n")
    content = {
        "benchmark": "submit_cost",
        "settings": settings(options),
        "cells": [cell.to_json() for cell in cells],
        "expansions": list(map(asdict, expansions)),
    }
    return finish(options, content, verdicts, sum(cell.wrong for cell in cells))


def _parser() -> ArgumentParser:
    parser = new_parser(__doc__)
    add_comparison(parser, samples=50, cold_samples=10)
    parser.add_argument("--blocks", type=int, nargs="+", help="in a transfer")
    return parser


def expand(outputs: int, factor: int, samples: int) -> Expansion:
    """expand_block_ids of so many outputs, and a memcpy of them; both into memory that is there."""
    ids = torch.randperm(outputs)[: -(-outputs // factor)]
    out, copied = (torch.zeros(outputs, dtype=torch.int64) for _ in range(2))
    ours, beside, allocating = (new_samples(samples) for _ in range(3))
    clock, to, of = time.perf_counter_ns, copied.data_ptr(), out.data_ptr()
    with no_garbage_collection():
        for number in range(-WARM_UPS, samples):
            start = clock()
            expand_block_ids(ids, factor, count=outputs, out=out)
            expanded = clock()
            ctypes.memmove(to, of, out.nbytes)
            moved = clock()
            expand_block_ids(ids, factor, count=outputs)
            allocated = clock()
            at = max(number, 0)
            ours[at], beside[at] = expanded - start, moved - expanded
            allocating[at] = allocated - moved
    right = (ids[:, None] * factor + torch.arange(factor)).view(-1)[:outputs]
    if not torch.equal(copied, right):
        raise RuntimeError("expand_block_ids gave other ids than it should")
    spreads = map(Spread.of, (ours, beside, allocating))
    return Expansion(outputs, factor, *spreads)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
