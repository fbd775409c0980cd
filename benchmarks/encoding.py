"""Compares pools with lossless encoding to raw pools, and pools with digests to those without, with
the keys and values of a real model.

Four handlers move scattered blocks of caches of their own: with encoding="raw" and "lossless", each
with verify="off" and "load". Each round moves once with each, and beside them one big copy of the
raw bytes and the reference of bandwidth.py, in changing order, warm. "both": a store and a load at
once. Then all run beside a decode GEMM, as in interference.py. All figures count the bytes of the
KV cache, not those on the link. All bytes are compared after each cell. Without a GPU the shapes
are smaller, and nothing is judged. The exit code is 1 if bytes are wrong, else 0, whether targets
are met or not.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # a checkout need not be installed

import torch
from big_copy import Before
from blocks import ONE_BY_ONE
from comparison import WARM, Comparison, Timed, add_comparison, settings
from computes import computes
from encoding_report import LOSSLESS, RAW, VERIFIED, Cell, judge, tables
from interference import measure as measure_beside
from interference_report import Cell as BesideCell
from model_blocks import ModelBlocks
from program import device_of, finish, is_judged, new_parser
from timing import Move, TimeLimit, no_garbage_collection, synchronize
from traffic import HandlerWay, Way
from transfers import BOTH, DIRECTIONS, Kind, Shape, blocks_of, move, shapes_of

from torch_kvswap import OffloadHandler
from torch_kvswap.cli.progress import Progress

SHAPES = ("160x8", "160x4", "160x2", "64x32", "1x2048")
BESIDE = Shape(160, 8)  # what moves beside the compute, so many MiB at a time
BESIDE_MIB = 128
# By name: the encoding, and what the pool is asked to verify.
WAYS = {
    RAW: (RAW, "off"),
    LOSSLESS: (LOSSLESS, "off"),
    VERIFIED[RAW]: (RAW, "load"),
    VERIFIED[LOSSLESS]: (LOSSLESS, "load"),
}


@dataclass(frozen=True)
class Pools:
    """The same cache once for each of WAYS, with its handler."""

    blocks: Mapping[str, ModelBlocks]
    handlers: Mapping[str, OffloadHandler]

    @classmethod
    def open(
        cls, device: torch.device, shape: Shape, count: int, options: Namespace, stack: ExitStack
    ) -> Pools:
        """`count` blocks and pages each. The stack closes them."""
        blocks, handlers = {}, {}
        for way, (encoding, verify) in WAYS.items():
            pool = {"encoding": encoding, "verify": verify}
            if encoding == LOSSLESS:
                pool["bits_per_value"] = options.bits
            of_way = ModelBlocks(device, count, shape.layers, shape.fragment_kib * 1024, **pool)
            stack.enter_context(of_way.host)
            blocks[way] = of_way
            handler = OffloadHandler(of_way.layout, of_way.host)
            handlers[way] = stack.enter_context(handler)
        return cls(blocks, handlers)


def main(arguments: list[str]) -> int:
    options = _parser().parse_args(arguments)
    device = device_of(options)
    on_cuda = device.type == "cuda"
    shapes = shapes_of(options, on_cuda, SHAPES)
    cells = measure_all(device, shapes, blocks_of(options, on_cuda), options)
    beside, wrong = measure_compute(device, options, on_cuda)
    verdicts = judge(cells, beside) if is_judged(device) else []
    print(tables(cells, beside), "", *verdicts, "", sep="\n")
    content = {
        "benchmark": "encoding",
        "settings": {**settings(options), "bits": options.bits},
        "cells": [cell.to_json() for cell in cells],
        "beside compute": [cell.to_json() for cell in beside],
    }
    return finish(options, content, verdicts, wrong + sum(cell.wrong for cell in cells))


def _parser() -> ArgumentParser:
    parser = new_parser(__doc__)
    add = parser.add_argument
    add_comparison(parser, samples=20, cold_samples=0)
    parser.set_defaults(arrangements=[ONE_BY_ONE])
    add("--bits", type=float, default=12.125, help="per value of a slot: 12.125 or 12.5")
    add("--repeats", type=int, default=4, help="beside the compute")
    return parser


def measure_all(
    device: torch.device, shapes: Sequence[Shape], counts: Sequence[int], options: Namespace
) -> list[Cell]:
    kinds = [*product((*DIRECTIONS, BOTH), counts)]
    number = len(shapes) * len(kinds)
    progress = Progress("encoding", number, sys.stderr)
    nbytes = max(counts) * max(shape.block_bytes for shape in shapes)
    comparison = Comparison(device, options, nbytes, number)
    cells = []
    for shape in shapes:
        count = 2 * max(*counts, 16) + 18  # some do not move
        with ExitStack() as stack:
            pools = Pools.open(device, shape, count, options, stack)
            stack.enter_context(no_garbage_collection())
            for direction, blocks in kinds:
                kind = Kind(shape, ONE_BY_ONE, direction, blocks)
                cells.append(measure(comparison, pools, kind))
                progress.advance(1)
        del pools
        if device.type == "cuda":
            torch.cuda.empty_cache()  # the next shape has blocks of another size
    return cells


def measure(comparison: Comparison, pools: Pools, kind: Kind) -> Cell:
    def moved(way: str, before: Before) -> Move:
        blocks = pools.blocks[way]
        return move(pools.handlers[way], blocks, kind.directions, kind.blocks, before)

    ways: dict[str, Timed] = {way: partial(moved, way) for way in WAYS}
    for blocks in pools.blocks.values():
        blocks.refill()
    cell = Cell(kind)
    cell.states[WARM] = comparison.run({**ways, **comparison.copies(kind)}, kind, WARM)
    cell.wrong = sum(blocks.wrong() for blocks in pools.blocks.values())
    return cell


def measure_compute(
    device: torch.device, options: Namespace, on_cuda: bool
) -> tuple[list[BesideCell], int]:
    """Cells of decode beside each way; and the blocks and pages with wrong bytes."""
    shape = BESIDE if on_cuda else Shape(2, 8)
    count = (BESIDE_MIB << 20) // shape.block_bytes if on_cuda else 8
    decode = computes(device, 0.06 if on_cuda else 0.02)[0]
    limit = TimeLimit(options.time_limit and options.time_limit / 4, len(DIRECTIONS))
    cells, wrong = [], 0
    with ExitStack() as stack:
        pools = Pools.open(device, shape, 3 * count + 2, options, stack)
        for direction in DIRECTIONS:
            ways: dict[str, Way] = {
                name: HandlerWay(pools.handlers[name], pools.blocks[name], direction, count, None)
                for name in WAYS
            }
            samples = measure_beside(decode, ways, options.repeats, limit.next_part())
            for name, taken in samples.items():
                used = sorted(_copy_methods(ways[name]))
                kind = shape, ONE_BY_ONE, direction, decode.name, name
                cells.append(BesideCell(*kind, taken, used, 0.0))
        synchronize(device)
        wrong = sum(blocks.wrong() for blocks in pools.blocks.values())
    return cells, wrong


def _copy_methods(way: Any) -> set[str]:
    methods: set[str] = way.copy_methods
    return methods


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
