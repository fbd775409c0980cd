"""Compares pools with lossless encoding to raw pools, and pools with checksums to those without,
with the keys and values of a real model.

Four handlers move scattered blocks of caches of their own: with encoding="raw" and "lossless", each
with verify="off" and "load". Each round moves once with each, and beside them one big copy of the
raw bytes and the reference of bandwidth.py, in changing order, warm. "both": a store and a load at
once. Then all run beside a decode GEMM, as in interference.py. All figures count the bytes of the
KV cache, not those on the link. All bytes are compared after each cell. Without a GPU the shapes
are smaller.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[1]))  # a checkout need not be installed

import comparison
import torch
from big_copy import Before
from blocks import ONE_BY_ONE
from comparison import (
    WARM,
    Comparison,
    Timed,
    comparison_parser,
    measure_kinds,
    plan_of,
    settings,
)
from computes import computes
from interference import Cell as BesideCell
from interference import measure as measure_beside
from model_blocks import ModelBlocks
from program import device_of, finish
from report import Column, table_of
from timing import Move, TimeLimit, synchronize
from traffic import HandlerWay
from transfers import BOTH, DIRECTIONS, Kind, Shape, move

from torch_kvswap import OffloadHandler

RAW, LOSSLESS = "raw", "lossless"
VERIFIED = {RAW: "raw, verified", LOSSLESS: "lossless, verified"}
SHAPES = ("160x8", "160x4", "160x2", "64x32", "1x2048")
SHAPE_BESIDE = Shape(160, 8)  # what moves beside the compute, so many MiB at a time
MIB_BESIDE = 128
# By name: the encoding, and what the pool is asked to verify.
WAYS = {
    RAW: (RAW, "off"),
    LOSSLESS: (LOSSLESS, "off"),
    VERIFIED[RAW]: (RAW, "load"),
    VERIFIED[LOSSLESS]: (LOSSLESS, "load"),
}


def main(arguments: list[str]) -> int:
    options = _parser().parse_args(arguments)
    plan = plan_of(options, (WARM,), SHAPES, (*DIRECTIONS, BOTH))
    cells = measure_kinds(plan, options, Pools.open, measure)
    beside, wrong = measure_compute(options)
    print(tables(cells, beside), "", sep="\n")
    content = {
        "benchmark": "encoding",
        "settings": settings(options),
        "cells": [cell.to_json() for cell in cells],
        "beside compute": [cell.to_json() for cell in beside],
    }
    return finish(options, content, wrong + sum(cell.wrong for cell in cells))


def _parser() -> ArgumentParser:
    parser = comparison_parser(__doc__, samples=20, cold_samples=0)
    parser.set_defaults(arrangements=[ONE_BY_ONE])
    return parser


@dataclass(frozen=True)
class Pools:
    """The same cache once for each of WAYS, with its handler."""

    blocks: Mapping[str, ModelBlocks]
    handlers: Mapping[str, OffloadHandler]

    @classmethod
    def open(
        cls, device: torch.device, shape: Shape, arrangement: str, count: int, stack: ExitStack
    ) -> Pools:
        """`count` blocks and pages each. The stack closes them."""
        blocks, handlers = {}, {}
        for way, (encoding, verify) in WAYS.items():
            of_way = ModelBlocks(
                device,
                count,
                shape.layers,
                shape.fragment_kib * 1024,
                arrangement,
                encoding=encoding,
                verify=verify,
            )
            stack.enter_context(of_way.host)
            blocks[way] = of_way
            handler = OffloadHandler(of_way.layout, of_way.host)
            handlers[way] = stack.enter_context(handler)
        return cls(blocks, handlers)


class Cell(comparison.Cell):
    """Transfers of one kind with each encoding."""

    @property
    def speedup(self) -> float:
        """KV bytes per second over those of the raw pool; the median over the rounds."""
        return self.states[WARM].ratio(RAW, LOSSLESS)

    def added_us(self, way: str, to: str = RAW) -> float:
        """Microseconds that a way takes longer than another; the median over the rounds."""
        samples = self.states[WARM]
        pairs = zip(samples.numbers(way), samples.numbers(to), strict=True)
        return median(mine - other for mine, other in pairs)

    def verified(self, encoding: str) -> float:
        """Time with checksums over that without; the median over the rounds."""
        return self.states[WARM].ratio(VERIFIED[encoding], encoding)


def measure(compared: Comparison, pools: Pools, kind: Kind) -> Cell:
    def moved(way: str, before: Before) -> Move:
        blocks = pools.blocks[way]
        return move(pools.handlers[way], blocks, kind.directions, kind.blocks, before)

    ways: dict[str, Timed] = {way: partial(moved, way) for way in WAYS}
    for blocks in pools.blocks.values():
        blocks.refill()
    cell = Cell(kind)
    cell.states[WARM] = compared.run({**ways, **compared.copies(kind)}, kind, WARM)
    cell.wrong = sum(blocks.wrong() for blocks in pools.blocks.values())
    return cell


def measure_compute(options: Namespace) -> tuple[list[BesideCell], int]:
    """Cells of decode beside each way; and the blocks and pages with wrong bytes."""
    device, on_cuda = device_of(options), options.device == "cuda"
    shape = SHAPE_BESIDE if on_cuda else Shape(2, 8)
    count = (MIB_BESIDE << 20) // shape.block_bytes if on_cuda else 8
    decode = computes(device)[0]
    limit = TimeLimit(options.time_limit and options.time_limit / 4, len(DIRECTIONS))
    cells, wrong = [], 0
    with ExitStack() as stack:
        pools = Pools.open(device, shape, ONE_BY_ONE, 3 * count + 2, stack)
        for direction in DIRECTIONS:
            ways = {
                name: HandlerWay(pools.handlers[name], pools.blocks[name], direction, count)
                for name in WAYS
            }
            samples = measure_beside(decode, ways, limit.next_part())
            for name, taken in samples.items():
                used = sorted(ways[name].copy_methods)
                kind = shape, ONE_BY_ONE, direction, decode.name, name
                cells.append(BesideCell(*kind, taken, used, 0.0))
        synchronize(device)
        wrong = sum(blocks.wrong() for blocks in pools.blocks.values())
    return cells, wrong


CELLS: list[Column[Cell]] = [
    Column("warm", lambda cell: f"{cell.kind.shape}, {cell.kind.arrangement}"),
    Column("blocks", lambda cell: cell.kind.blocks),
    Column("direction", lambda cell: cell.kind.direction),
    Column("speedup", lambda cell: cell.speedup),
    Column("added us", lambda cell: cell.added_us(LOSSLESS)),
    Column("raw verified / raw", lambda cell: cell.verified(RAW)),
    Column("added us", lambda cell: cell.added_us(VERIFIED[RAW])),
    Column("lossless verified / lossless", lambda cell: cell.verified(LOSSLESS)),
    Column("added us", lambda cell: cell.added_us(VERIFIED[LOSSLESS], LOSSLESS)),
    Column("method", lambda cell: "/".join(cell.states[WARM].copy_methods[LOSSLESS])),
]
BESIDE: list[Column[BesideCell]] = [
    Column("beside decode", lambda cell: str(cell.shape)),
    Column("direction", lambda cell: cell.direction),
    Column("pool", lambda cell: cell.way),
    Column("lost ms/GB of KV", lambda cell: cell.lost),
    Column("GB/s of KV", lambda cell: cell.gb_per_s),
]


def tables(cells: Sequence[Cell], beside: Sequence[BesideCell]) -> str:
    return f"{table_of(CELLS, cells)}\n\n{table_of(BESIDE, beside)}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
