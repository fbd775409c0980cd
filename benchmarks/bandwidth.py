"""Moves scattered blocks, and shows how much longer that takes than one big copy of their bytes.

Total time runs from the call of store() or load() until handler.synchronize() returns; that of the
big copy, pinned, from the call until the host sees its event. Both in turn, first the one, then the
other; medians. "link" is of the time on the device alone: both are given to it behind a stream that
is held. Blocks and pages: other random ids, as lists, in every transfer. Without a GPU the big copy
is one of PyTorch, nothing is judged, and there are fewer and smaller shapes. All bytes are compared
after each cell. Ends with 1 when bytes are wrong, else with 0, whether or not the targets are met.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # a checkout need not be installed

import torch
from bandwidth_report import SUBMIT_US, Cell, counts, judge, tables
from big_copy import BigCopy
from blocks import NumberedBlocks
from program import device_of, finish, new_parser
from timing import no_garbage_collection, synchronize
from transfers import DIRECTIONS, Kind, Shape, add_shapes, link_us, move, shapes_of

from torch_kvswap import OffloadHandler
from torch_kvswap.cli.progress import Progress
from torch_kvswap.copy_method import CHOICES

WARM_UPS = 3
LINK_EACH = 4  # of so many pairs one is measured on the device too


def main(arguments: list[str]) -> int:
    options = _parser().parse_args(arguments)
    device = device_of(options)
    on_cuda = device.type == "cuda"
    shapes = shapes_of(options, on_cuda)
    blocks = options.blocks or (list(SUBMIT_US) if on_cuda else [1, 8])
    how = {"copy_method": options.copy_method, "staging_bytes": options.staging_mib << 20}
    cells = measure_all(device, shapes, sorted(set(blocks)), options.samples, options.poll, how)
    print(tables(cells, "one big copy" if on_cuda else "one copy of PyTorch", judged=on_cuda))
    print("", *([counts(cells)] if on_cuda else []), sep="\n")
    content = {
        "benchmark": "bandwidth",
        "settings": {
            "samples": options.samples,
            "warm_ups": WARM_UPS,
            "poll": options.poll,
            "path": options.copy_method,
            "staging_mib": options.staging_mib,
        },
        "cells": [cell.to_json() for cell in cells],
    }
    verdicts = judge(cells) if on_cuda else []
    return finish(options, content, verdicts, sum(cell.wrong for cell in cells))


def _parser() -> ArgumentParser:
    parser = new_parser(__doc__)
    add = parser.add_argument
    add("--samples", type=int, default=20, help="pairs in a cell, after the warm-up")
    add_shapes(parser)
    add("--blocks", type=int, nargs="+", choices=list(SUBMIT_US), help="in a transfer")
    add("--poll", action="store_true", help="look in a loop, before wait(), which sleeps at times")
    add(
        "--copy-method",
        choices=CHOICES,
        help="of the handler; default: auto, or what KVSWAP_COPY_METHOD says",
    )
    add("--staging-mib", type=int, default=32, help="of the handler")
    return parser


def measure_all(
    device: torch.device,
    shapes: Sequence[Shape],
    counts: Sequence[int],
    samples: int,
    poll: bool,
    how: Mapping[str, Any],
) -> list[Cell]:
    """how: the handler's options."""
    big = BigCopy(device, max(counts) * max(shape.block_bytes for shape in shapes))
    progress = Progress("cells", len(shapes) * len(DIRECTIONS) * len(counts), True, sys.stderr)
    cells = []
    for shape in shapes:
        # Twice the blocks that move, and two that never do. With very few a page would soon get a
        # block that it has, and nobody would see when it does not.
        blocks = shape.new_blocks(device, 2 * max(*counts, 16) + 2)
        with blocks.host, OffloadHandler(blocks.layout, blocks.host, **how) as handler:
            for direction, count in product(DIRECTIONS, counts):
                kind = Kind(shape, direction, count)
                cells.append(measure(handler, blocks, big, kind, samples, poll))
                progress.advance(1)
        del handler, blocks
        if device.type == "cuda":
            torch.cuda.empty_cache()  # the next shape has blocks of another size
    return cells


def measure(
    handler: Any, blocks: NumberedBlocks, big: BigCopy, kind: Kind, samples: int, poll: bool
) -> Cell:
    """The first and the last block and page stay as they are."""
    blocks.refill()
    directions = [kind.direction]
    cell = Cell(kind)
    stream = torch.cuda.Stream(blocks.device) if blocks.device.type == "cuda" else None
    with no_garbage_collection():
        for number in range(-WARM_UPS, samples):
            # Neither of the two is always the first.
            before = big.nanoseconds(directions, kind.nbytes) if number % 2 == 0 else None
            moved = move(handler, blocks, directions, kind.blocks, poll)
            beside = before or big.nanoseconds(directions, kind.nbytes)
            if number >= 0:
                cell.add(moved, beside / 1e3)
            if stream and number % LINK_EACH == 0:
                cell.add_link(link_us(handler, blocks, directions, kind.blocks, big, stream))
    synchronize(blocks.device)
    cell.wrong = blocks.wrong()
    return cell


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
