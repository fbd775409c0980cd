"""Compares the copy method that a handler chooses for scattered blocks with each forced method.

Total time is from the call of store() or load() until handler.synchronize() returns. Each sample
copies once with each method, in changing order. A forced method that takes more than twice as long
as the best in the first samples is left out of the others. All handlers share a cache and a pool,
whose bytes are compared after each cell. Without a GPU no method can be forced. The exit code is 1
if bytes are wrong, else 0, whether targets are met or not.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # a checkout need not be installed

import torch
from bandwidth_report import SUBMIT_US
from blocks import NumberedBlocks
from copy_methods_report import Cell, judge, tables
from program import device_of, finish, new_parser
from timing import no_garbage_collection, synchronize
from transfers import DIRECTIONS, Kind, Shape, add_shapes, move, shapes_of

from torch_kvswap import OffloadHandler
from torch_kvswap.cli.progress import Progress
from torch_kvswap.copy_method import AUTO, CHOICES

FORCED = [copy_method for copy_method in CHOICES if copy_method != AUTO]
WARM_UPS = 3
FIRST = 2  # samples after which a slow copy_method is left out


def main(arguments: list[str]) -> int:
    options = _parser().parse_args(arguments)
    device = device_of(options)
    on_cuda = device.type == "cuda"
    shapes = shapes_of(options, on_cuda)
    blocks = options.blocks or (list(SUBMIT_US) if on_cuda else [1, 8])
    cells = measure_all(device, shapes, sorted(set(blocks)), options.samples)
    verdicts = judge(cells) if on_cuda else []
    missed = [verdict for verdict in verdicts if verdict.met is False]
    print(tables(cells), "", *missed, "", sep="\n")
    content = {
        "benchmark": "copy_methods",
        "settings": {"samples": options.samples, "warm_ups": WARM_UPS},
        "cells": [cell.to_json() for cell in cells],
    }
    return finish(options, content, verdicts, sum(cell.wrong for cell in cells))


def _parser() -> ArgumentParser:
    parser = new_parser(__doc__)
    add = parser.add_argument
    add("--samples", type=int, default=10, help="of each copy_method in a cell, after the warm-up")
    add_shapes(parser)
    add("--blocks", type=int, nargs="+", help="in a transfer")
    return parser


def measure_all(
    device: torch.device, shapes: Sequence[Shape], counts: Sequence[int], samples: int
) -> list[Cell]:
    progress = Progress(
        "copy methods", len(shapes) * len(DIRECTIONS) * len(counts), True, sys.stderr
    )
    cells = []
    for shape in shapes:
        blocks = shape.new_blocks(device, 2 * max(*counts, 16) + 2)  # half of them do not move
        with ExitStack() as stack:
            stack.enter_context(blocks.host)
            ways, refused = handlers(blocks)
            for handler in ways.values():
                stack.enter_context(handler)
            for direction, count in product(DIRECTIONS, counts):
                kind = Kind(shape, direction, count)
                cells.append(measure(ways, refused, blocks, kind, samples))
                progress.advance(1)
        del ways, blocks
        if device.type == "cuda":
            torch.cuda.empty_cache()  # the next shape has blocks of another size
    return cells


def handlers(blocks: NumberedBlocks) -> tuple[dict[str, OffloadHandler], dict[str, str]]:
    """By copy_method, first the one that chooses; and why the others cannot be had."""
    ways, refused = {AUTO: OffloadHandler(blocks.layout, blocks.host, copy_method=AUTO)}, {}
    for copy_method in FORCED if blocks.device.type == "cuda" else ():
        try:
            ways[copy_method] = OffloadHandler(blocks.layout, blocks.host, copy_method=copy_method)
        except ValueError as error:
            refused[copy_method] = str(error)
    return ways, refused


def measure(
    ways: Mapping[str, Any],
    refused: Mapping[str, str],
    blocks: NumberedBlocks,
    kind: Kind,
    samples: int,
) -> Cell:
    blocks.refill()
    cell = Cell(kind, {name: [] for name in ways}, dict(refused))
    names = list(ways)
    with no_garbage_collection():
        for number in range(-WARM_UPS, samples):
            if number == FIRST:
                names = cell.worth_while()
            first = number % len(names)
            for name in names[first:] + names[:first]:
                moved = move(ways[name], blocks, [kind.direction], kind.blocks)
                if number >= 0:
                    cell.add(name, moved.total_us, moved.copy_method)
    synchronize(blocks.device)
    cell.wrong = blocks.wrong()
    return cell


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
