"""Times the calls of store() and load() alone, by blocks and by slabs, and expand_block_ids.

"held": the caller's stream is busy, so the transfer begins only after the call. "free": nothing is
held, each call comes when all before it has ended. Without a GPU only "free" runs, the call copies
too, and nothing of it is judged. The ids are other random ones, as lists, in every call; all bytes
are compared after each cell.

expand_block_ids writes 1 M ids on the CPU into memory that has been written before, beside a
memcpy of as many bytes into such memory, in turn.

Ends with 1 when bytes are wrong, else with 0, whether or not the targets are met.
"""

from __future__ import annotations

import ctypes
import sys
import time
from argparse import ArgumentParser
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # a checkout need not be installed

import torch
from blocks import NumberedBlocks
from program import device_of, finish, new_parser
from submit_cost_report import Cell, Expansion, expansion_table, judge, tables
from timing import Hold, Spread, new_samples, no_garbage_collection, synchronize
from transfers import DIRECTIONS, move

from torch_kvswap import OffloadHandler, expand_block_ids
from torch_kvswap.cli.progress import Progress

BLOCKS = (1, 8, 64, 512, 4096)
SLABS = (1, 16, 64, 160)
FACTORS = (4, 16, 64)  # small blocks in a large one
OUTPUTS = 1_000_000
WARM_UPS = 3


def main(arguments: list[str]) -> int:
    options = _parser().parse_args(arguments)
    device = device_of(options)
    on_cuda = device.type == "cuda"
    counts = options.blocks or (BLOCKS if on_cuda else BLOCKS[:3])
    cells = measure_all(device, options.slabs, counts, options.samples, options.fragment_bytes)
    expansions = [expand(OUTPUTS, factor, options.samples) for factor in FACTORS]
    verdicts = judge(cells if on_cuda else [], expansions)
    print(tables(cells), "", expansion_table(expansions), "", *verdicts, "", sep="\n")
    content = {
        "benchmark": "submit_cost",
        "settings": {"samples": options.samples, "fragment_bytes": options.fragment_bytes},
        "cells": list(map(asdict, cells)),
        "expansions": list(map(asdict, expansions)),
    }
    return finish(options, content, verdicts, sum(cell.wrong for cell in cells))


def _parser() -> ArgumentParser:
    parser = new_parser(__doc__)
    add = parser.add_argument
    add("--samples", type=int, default=100, help="calls in a cell, after the warm-up")
    add("--blocks", type=int, nargs="+", help="in a transfer")
    add("--slabs", type=int, nargs="+", default=SLABS, help="of the cache")
    add("--fragment-bytes", type=int, default=1024, help="of a block in one slab")
    return parser


def measure_all(
    device: torch.device,
    slabs: Sequence[int],
    counts: Sequence[int],
    samples: int,
    fragment_bytes: int,
) -> list[Cell]:
    states = ("held", "free") if device.type == "cuda" else ("free",)
    kinds = list(product(counts, DIRECTIONS, states))
    progress = Progress("calls", len(slabs) * len(kinds), True, sys.stderr)
    cells = []
    for count in slabs:
        blocks = NumberedBlocks(device, max(*counts, 16) + 2, count, fragment_bytes)
        with blocks.host, OffloadHandler(blocks.layout, blocks.host) as handler:
            for moving, direction, state in kinds:
                cells.append(measure(handler, blocks, direction, moving, state, samples))
                progress.advance(1)
    return cells


def measure(
    handler: Any, blocks: NumberedBlocks, direction: str, count: int, state: str, samples: int
) -> Cell:
    blocks.refill()
    times, paths = new_samples(samples), set()
    held = state == "held"
    stream = torch.cuda.Stream(blocks.device) if held else None
    with no_garbage_collection(), torch.cuda.stream(stream) if stream else nullcontext():
        for number in range(-WARM_UPS, samples):
            if stream:
                Hold(stream, 0.002 + 4e-6 * count)  # longer than the call
            moved = move(handler, blocks, [direction], count)
            times[max(number, 0)] = moved.submit_us * 1e3  # what warms up is written over
            paths.add(moved.copy_method)
    synchronize(blocks.device)
    slabs = len(blocks.layout.sizes)
    spread = Spread.of(times)
    return Cell(slabs, direction, count, state, spread, sorted(paths), blocks.wrong())


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
