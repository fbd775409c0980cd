"""Moves scattered blocks, and shows how much longer that takes than one big copy of their bytes.

Total time runs from the call of store() or load() until handler.wait() returns; that of the big
copy, pinned, from the call until the host sees its event. Both in turn, first the one, then the
other; medians. Blocks and pages: other random ids, as lists, in every transfer. Without a GPU the
big copy is one of PyTorch, nothing is judged, and there are fewer and smaller shapes. All bytes are
compared after each cell. Ends with 1 when bytes are wrong, else with 0, whether or not the targets
are met.
"""

from __future__ import annotations

import sys
import time
from argparse import ArgumentParser
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # a checkout need not be installed

import torch
from bandwidth_report import SUBMIT_US, Cell, Kind, Shape, counts, judge, tables
from blocks import NumberedBlocks
from report import write_json
from timing import BigCopy, no_garbage_collection, synchronize

from torch_kvswap import OffloadHandler
from torch_kvswap.cli.progress import Progress

SHAPES = ["64x32", "160x8", "160x4", "56x16", "61x18", "160x2", "1x2048"]
DIRECTIONS = ("store", "load")
WARM_UPS = 3


def main(arguments: list[str]) -> int:
    options = _parser().parse_args(arguments)
    on_cuda = options.device == "cuda"
    device = torch.device("cuda", torch.cuda.current_device()) if on_cuda else torch.device("cpu")
    shapes = options.shapes or [Shape.parse(text) for text in (SHAPES if on_cuda else SHAPES[-2:])]
    blocks = options.blocks or (list(SUBMIT_US) if on_cuda else [1, 8])
    cells = measure_all(device, shapes, sorted(set(blocks)), options.samples, options.poll)
    print(tables(cells, "one big copy" if on_cuda else "one copy of PyTorch", judged=on_cuda))
    wrong = sum(cell.wrong for cell in cells)
    print("", *([counts(cells)] if on_cuda else []), sep="\n")
    print(f"blocks and pages with wrong bytes: {wrong}")
    if options.json:
        content = {
            "benchmark": "bandwidth",
            "settings": {"samples": options.samples, "warm_ups": WARM_UPS, "poll": options.poll},
            "cells": [cell.to_json() for cell in cells],
        }
        write_json(options.json, device, content, judge(cells) if on_cuda else [])
    return 1 if wrong else 0


def _parser() -> ArgumentParser:
    parser = ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    add("--samples", type=int, default=20, help="pairs in a cell, after the warm-up")
    add("--shapes", type=Shape.parse, nargs="+", help="of a block, layers x KiB: 64x32")
    add("--blocks", type=int, nargs="+", choices=list(SUBMIT_US), help="in a transfer")
    add("--poll", action="store_true", help="look in a loop, before wait(), which sleeps at times")
    add("--json", type=Path, help="where the figures go")
    return parser


def measure_all(
    device: torch.device, shapes: Sequence[Shape], counts: Sequence[int], samples: int, poll: bool
) -> list[Cell]:
    big = BigCopy(device, max(counts) * max(shape.block_bytes for shape in shapes))
    progress = Progress("cells", len(shapes) * len(DIRECTIONS) * len(counts), True, sys.stderr)
    cells = []
    for shape in shapes:
        # Twice the blocks that move, and two that never do. With very few a page would soon get a
        # block that it has, and nobody would see when it does not.
        held = 2 * max(*counts, 16) + 2
        blocks = NumberedBlocks(device, held, shape.layers, shape.fragment_kib * 1024)
        with blocks.host, OffloadHandler(blocks.layout, blocks.host) as handler:
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
    nbytes = kind.blocks * kind.shape.block_bytes
    pairs = []
    paths = set()
    with no_garbage_collection():
        for number in range(WARM_UPS + samples):
            block_ids, page_ids = (
                1 + torch.randperm(blocks.count - 2)[: kind.blocks] for _ in range(2)
            )
            # Neither of the two is always the first.
            before = big.nanoseconds(kind.direction, nbytes) if number % 2 == 0 else None
            total, submit, path = _move(handler, kind.direction, block_ids, page_ids, poll)
            beside = before or big.nanoseconds(kind.direction, nbytes)
            if kind.direction == "store":
                blocks.note_store(block_ids, page_ids)
            else:
                blocks.note_load(page_ids, block_ids)
            pairs.append((total / 1e3, beside / 1e3, submit / 1e3))
            paths.add(path)
    total_us, big_us, submit_us = map(list, zip(*pairs[WARM_UPS:], strict=True))
    synchronize(blocks.device)
    return Cell(kind, total_us, big_us, submit_us, sorted(paths), wrong=blocks.wrong())


def _move(
    handler: Any, direction: str, block_ids: torch.Tensor, page_ids: torch.Tensor, poll: bool
) -> tuple[int, int, str]:
    """Nanoseconds until the end was seen, and in the call; the path."""
    blocks, pages = block_ids.tolist(), page_ids.tolist()
    start = time.perf_counter_ns()
    job = handler.store(blocks, pages) if direction == "store" else handler.load(pages, blocks)
    submitted = time.perf_counter_ns()
    while poll and not job.done():
        pass
    handler.wait(job)
    end = time.perf_counter_ns()
    path = job.result.path
    handler.finished()  # forgets the job
    return end - start, submitted - start, path


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
