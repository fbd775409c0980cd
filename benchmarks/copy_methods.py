"""Compares the copy method that a handler chooses for scattered blocks with each forced method.

Total time is from the call of store() or load() until handler.synchronize() returns. Each round
copies once with each method, and beside them one big copy and the reference of bandwidth.py, in
changing order, warm and cold. "copy engines only" and "expedited" are options of a handler that
chooses. A forced method or an option that takes more than twice as long as the best in the first
rounds is left out of the others, and of the cold ones. All handlers share a cache and a pool, whose
bytes are compared after each cell. Without a GPU no method can be forced. The exit code is 1 if
bytes are wrong, else 0, whether targets are met or not.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # a checkout need not be installed

import torch
from big_copy import Before
from blocks import NumberedBlocks
from comparison import COLD, WARM, Comparison, Timed, add_comparison, settings
from copy_methods_report import COPY_ENGINES_ONLY, EXPEDITED, Cell, candidates, judge, tables
from program import device_of, finish, is_judged, new_parser
from timing import Move, no_garbage_collection
from transfers import DIRECTIONS, Kind, Shape, blocks_of, move, shapes_of

from torch_kvswap import OffloadHandler
from torch_kvswap.cli.progress import Progress
from torch_kvswap.copy_method import AUTO, CHOICES, COPY_ENGINES

STATES = (WARM, COLD)
FORCED = [copy_method for copy_method in CHOICES if copy_method not in (AUTO, COPY_ENGINES)]


def main(arguments: list[str]) -> int:
    options = _parser().parse_args(arguments)
    device = device_of(options)
    on_cuda = device.type == "cuda"
    shapes = shapes_of(options, on_cuda)
    blocks = blocks_of(options, on_cuda)
    cells = measure_all(device, shapes, sorted(set(blocks)), options)
    verdicts = judge(cells) if is_judged(device) else []
    missed = [verdict for verdict in verdicts if verdict.met is False]
    print(tables(cells), "", *missed, "", sep="\n")
    content = {
        "benchmark": "copy_methods",
        "settings": settings(options),
        "cells": [cell.to_json() for cell in cells],
    }
    return finish(options, content, verdicts, sum(cell.wrong for cell in cells))


def _parser() -> ArgumentParser:
    parser = new_parser(__doc__)
    add_comparison(parser, samples=10, cold_samples=5)
    parser.add_argument("--blocks", type=int, nargs="+", help="in a transfer")
    return parser


def measure_all(
    device: torch.device, shapes: Sequence[Shape], counts: Sequence[int], options: Namespace
) -> list[Cell]:
    kinds = [*product(DIRECTIONS, counts)]
    number = len(options.arrangements) * len(shapes) * len(kinds)
    progress = Progress("copy methods", number, sys.stderr)
    nbytes = max(counts) * max(shape.block_bytes for shape in shapes)
    comparison = Comparison(device, options, nbytes, len(STATES) * number)
    cells = []
    for arrangement, shape in product(options.arrangements, shapes):
        count = 2 * max(*counts, 16) + 2  # half of them do not move
        blocks = shape.new_blocks(device, count, arrangement)
        with ExitStack() as stack:
            stack.enter_context(blocks.host)
            ours, refused = handlers(blocks)
            for handler in ours.values():
                stack.enter_context(handler)
            stack.enter_context(no_garbage_collection())
            for direction, count in kinds:
                kind = Kind(shape, arrangement, direction, count)
                cells.append(measure(comparison, ours, refused, blocks, kind))
                progress.advance(1)
        del ours, handler, blocks
        if device.type == "cuda":
            torch.cuda.empty_cache()  # the next shape has blocks of another size
    return cells


def handlers(blocks: NumberedBlocks) -> tuple[dict[str, OffloadHandler], dict[str, str]]:
    """By copy_method, first the one that chooses; and why the others cannot be had."""
    ours, refused = {AUTO: OffloadHandler(blocks.layout, blocks.host, copy_method=AUTO)}, {}
    for copy_method in FORCED if blocks.device.type == "cuda" else ():
        try:
            ours[copy_method] = OffloadHandler(blocks.layout, blocks.host, copy_method=copy_method)
        except ValueError as error:
            refused[copy_method] = str(error)
    return ours, refused


def measure(
    comparison: Comparison,
    ours: Mapping[str, Any],
    refused: Mapping[str, str],
    blocks: NumberedBlocks,
    kind: Kind,
) -> Cell:
    def moved(handler: Any, before: Before, **options: Any) -> Move:
        return move(handler, blocks, kind.directions, kind.blocks, before, **options)

    blocks.refill()
    cell = Cell(kind, refused=dict(refused))
    ways: dict[str, Timed] = {name: partial(moved, handler) for name, handler in ours.items()}
    if len(ours) > 1:  # the device has methods to choose from
        ways[COPY_ENGINES_ONLY] = partial(moved, ours[AUTO], copy_method=COPY_ENGINES)
    if len(ours) > 1 and kind.direction == "load":
        ways[EXPEDITED] = partial(moved, ours[AUTO], expedited=True)
    ways.update(comparison.copies(kind))
    for state in STATES:
        cell.states[state] = samples = comparison.run(ways, kind, state, candidates)
        ways = {name: ways[name] for name in samples.complete}
    cell.wrong = blocks.wrong()
    return cell


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
