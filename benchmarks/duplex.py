"""Stores and loads at once through one handler, and shows how that compares with two big copies.

"total": from the first call until the host sees the end of both; a big copy each way at once
likewise, and the two in turn. "link": everything is given to a GPU whose stream is held, and timed
there from the end of the hold on, so that the host costs nothing. Without a GPU there is no "link",
the copies run one after the other, and nothing is judged. All bytes are compared after each cell.
Ends with 1 when bytes are wrong, else with 0, whether or not the target is met.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # a checkout need not be installed

import torch
from big_copy import BigCopy
from blocks import NumberedBlocks
from duplex_report import Cell, judge, table_of
from program import device_of, finish, new_parser
from timing import no_garbage_collection, synchronize
from transfers import DIRECTIONS, Shape, add_shapes, link_us, move, shapes_of

from torch_kvswap import OffloadHandler
from torch_kvswap.cli.progress import Progress

WARM_UPS = 3


def main(arguments: list[str]) -> int:
    options = _parser().parse_args(arguments)
    device = device_of(options)
    on_cuda = device.type == "cuda"
    shapes = shapes_of(options, on_cuda)
    counts = options.blocks or ([64, 512] if on_cuda else [8])
    cells = measure_all(device, shapes, counts, options.samples)
    verdicts = judge(cells) if on_cuda else []
    print(table_of(cells), "", *verdicts, sep="\n")
    content = {
        "benchmark": "duplex",
        "settings": {"samples": options.samples, "warm_ups": WARM_UPS},
        "cells": [cell.to_json() for cell in cells],
    }
    return finish(options, content, verdicts, sum(cell.wrong for cell in cells))


def _parser() -> ArgumentParser:
    parser = new_parser(__doc__)
    add = parser.add_argument
    add("--samples", type=int, default=20, help="pairs in a cell, after the warm-up")
    add_shapes(parser)
    add("--blocks", type=int, nargs="+", help="in each of the two transfers")
    return parser


def measure_all(
    device: torch.device, shapes: Sequence[Shape], counts: Sequence[int], samples: int
) -> list[Cell]:
    big = BigCopy(device, max(counts) * max(shape.block_bytes for shape in shapes))
    progress = Progress("duplex", len(shapes) * len(counts), True, sys.stderr)
    cells = []
    for shape in shapes:
        blocks = shape.new_blocks(device, 3 * max(*counts, 16) + 2)  # a third does not move
        with blocks.host, OffloadHandler(blocks.layout, blocks.host) as handler:
            for count in counts:
                cells.append(measure(handler, blocks, big, shape, count, samples))
                progress.advance(1)
        del handler, blocks
        if device.type == "cuda":
            torch.cuda.empty_cache()  # the next shape has blocks of another size
    return cells


def measure(
    handler: Any, blocks: NumberedBlocks, big: BigCopy, shape: Shape, count: int, samples: int
) -> Cell:
    blocks.refill()
    nbytes = count * shape.block_bytes
    cell = Cell(shape, count)
    stream = torch.cuda.Stream(blocks.device) if blocks.device.type == "cuda" else None
    with no_garbage_collection():
        for number in range(-WARM_UPS, samples):
            # Neither of the two is always the first.
            before = big.nanoseconds(DIRECTIONS, nbytes) if number % 2 == 0 else None
            moved = move(handler, blocks, DIRECTIONS, count)
            beside = before or big.nanoseconds(DIRECTIONS, nbytes)
            link = link_us(handler, blocks, DIRECTIONS, count, big, stream) if stream else None
            if number >= 0:
                cell.add(moved, beside / 1e3, link)
    synchronize(blocks.device)
    cell.wrong = blocks.wrong()
    return cell


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
