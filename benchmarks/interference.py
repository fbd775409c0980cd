"""Runs compute beside transfers: what it loses for each GB moved, and how fast they are meanwhile.

The compute is on a stream of the default priority: a decode GEMM, attention over a cache, a kernel
bound by memory, a prefill, and a GEMM whose kernels hold every SM. Beside it goes one transfer of
scattered blocks after another, two at a time, by the handler as it chooses, with a forced copy
method, or with `copy_method="copy_engines"`; and one big pinned copy after another. "kernel" is the
method with which an SM kernel copies. In each repeat the compute runs alone once and then beside
each of them, in changing order; figures are medians of the repeats. Transfers follow each other at
once, so there is nothing cold here. Without a GPU nothing computes. All bytes are compared in the
end.
"""

from __future__ import annotations

import os
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # a checkout need not be installed

import torch
from big_copy import BigCopy
from computes import Compute, Idle, computes
from program import count, device_of, finish, new_parser
from report import Column, table_of
from timing import TimeLimit, in_turn, no_garbage_collection, summary, synchronize
from traffic import BigWay, HandlerWay, Way, beside
from transfers import DIRECTIONS, Shape, add_transfers, open_handlers, shapes_of

from torch_kvswap.copy_method import AUTO, COPY_ENGINES, DEFAULT_STAGING_BYTES

SHAPES = ("160x8", "160x4")
FORCED = ("staged", "kernel")
CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"  # hardware queues, which streams share
MIB = 128  # in a transfer
REPEATS, LEAST = 4, 2  # after one that warms up; that a limit of time leaves
BIG = "big copy"


def main(arguments: list[str]) -> int:
    options = _parser().parse_args(arguments)
    cells, wrong = measure_all(device_of(options), shapes_of(options, SHAPES), options)
    print(tables(cells), "", sep="\n")
    names = ("arrangements", "staging_mib", "time_limit")
    settings = {name: getattr(options, name) for name in names}
    settings[CONNECTIONS] = os.environ.get(CONNECTIONS)
    content = {
        "benchmark": "interference",
        "settings": settings,
        "cells": [cell.to_json() for cell in cells],
    }
    return finish(options, content, wrong)


def _parser() -> ArgumentParser:
    parser = new_parser(__doc__)
    add = parser.add_argument
    add_transfers(parser)
    add(
        "--staging-mib",
        type=count,
        default=DEFAULT_STAGING_BYTES >> 20,
        help="staging_bytes of a handler",
    )
    text = f"for the whole program; cells then have fewer repeats, but {LEAST} at least"
    add("--time-limit", type=float, metavar="SECONDS", help=text)
    return parser


@dataclass(frozen=True)
class Sample:
    """Milliseconds of the compute alone and beside transfers; what moved meanwhile, how fast."""

    floor_ms: float
    ms: float
    gb: float
    gb_per_s: float

    @property
    def lost(self) -> float:
        """Milliseconds of compute for each GB."""
        return (self.ms - self.floor_ms) / self.gb


@dataclass(frozen=True)
class Cell:
    """A compute beside one way of moving. link: GB/s of big copies alone."""

    shape: Shape
    arrangement: str
    direction: str
    compute: str
    way: str
    samples: list[Sample]
    copy_methods: list[str]
    link: float

    @property
    def lost(self) -> float:
        return median(sample.lost for sample in self.samples)

    @property
    def gb_per_s(self) -> float:
        return median(sample.gb_per_s for sample in self.samples)

    def to_json(self) -> dict[str, Any]:
        lost = [sample.lost for sample in self.samples]
        speeds = [sample.gb_per_s for sample in self.samples]
        return {
            "shape": vars(self.shape),
            "arrangement": self.arrangement,
            "direction": self.direction,
            "compute": self.compute,
            "way": self.way,
            "copy_methods": self.copy_methods,
            "link_gb_per_s": self.link,
            "lost_ms_per_gb": self.lost,
            "lost_spread": [min(lost), max(lost)],
            "gb_per_s": self.gb_per_s,
            "gb_per_s_spread": [min(speeds), max(speeds)],
            "count": len(self.samples),
            "compute_ms": {
                "alone": summary([sample.floor_ms for sample in self.samples]),
                "beside": summary([sample.ms for sample in self.samples]),
            },
        }


def measure_all(
    device: torch.device, shapes: Sequence[Shape], options: Namespace
) -> tuple[list[Cell], int]:
    """The cells; and the blocks and pages with wrong bytes."""
    nbytes = (MIB if device.type == "cuda" else 1) << 20
    beside_what = computes(device)  # before there are handlers: it captures graphs
    big = BigCopy(device, nbytes)
    links = {way: _link(big, way, nbytes) for way in DIRECTIONS}
    kinds = list(product(DIRECTIONS, beside_what))
    number = len(options.arrangements) * len(shapes) * len(kinds)
    limit = TimeLimit(options.time_limit, number)
    cells, wrong = [], 0
    for arrangement, shape in product(options.arrangements, shapes):
        count = max(1, nbytes // shape.block_bytes)
        blocks = shape.new_blocks(device, 3 * count + 2, arrangement)  # a third does not move
        with ExitStack() as stack:
            stack.enter_context(blocks.host)
            staging_bytes = options.staging_mib << 20
            methods = (AUTO, COPY_ENGINES, *FORCED)
            handlers, refused = open_handlers(blocks, methods, stack, staging_bytes=staging_bytes)
            for refusal in refused.items():
                print("no handler with {}: {}".format(*refusal))
            for direction, compute in kinds:
                ways: dict[str, Way] = {BIG: BigWay(big, direction, nbytes)}
                for name, handler in handlers.items():
                    ways[name] = HandlerWay(handler, blocks, direction, count)
                samples = measure(compute, ways, limit.next_part())
                for name, taken in samples.items():
                    used = sorted(getattr(ways[name], "copy_methods", ()))
                    link, kind = links[direction], (shape, arrangement, direction)
                    cells.append(Cell(*kind, compute.name, name, taken, used, link))
            synchronize(device)
            wrong += blocks.wrong()
    return cells, wrong


def _link(big: BigCopy, direction: str, nbytes: int) -> float:
    """GB/s of big copies with nothing beside them."""
    way = BigWay(big, direction, nbytes)
    beside(Idle(), way)  # touches the memory
    return median(beside(Idle(), way)[2] for _ in range(REPEATS))


def measure(compute: Compute, ways: Mapping[str, Way], end: float) -> dict[str, list[Sample]]:
    """end: after that time of perf_counter() no repeat begins once there are LEAST samples."""
    samples: dict[str, list[Sample]] = {name: [] for name in ways}
    with no_garbage_collection():
        for repeat in range(REPEATS + 1):
            if repeat > LEAST and time.perf_counter() > end:
                break
            floor = beside(compute, None)[0]
            for name in in_turn(list(ways), repeat):
                sample = Sample(floor, *beside(compute, ways[name]))
                if repeat > 0:
                    samples[name].append(sample)
    return samples


def tables(cells: Sequence[Cell]) -> str:
    kinds = dict.fromkeys((cell.arrangement, cell.direction, cell.shape) for cell in cells)
    said = ["ms: of compute lost for each GB moved; GB/s: meanwhile; medians"]
    for kind in kinds:
        chosen = [cell for cell in cells if (cell.arrangement, cell.direction, cell.shape) == kind]
        arrangement, direction, shape = kind
        link = f"{chosen[0].link:.2f} GB/s of the link with nothing beside it"
        said.append(f"{arrangement}, {direction} {shape}: {link}\n{_of_kind(chosen)}")
    return "\n\n".join(said)


def _of_kind(cells: Sequence[Cell]) -> str:
    """A row for each way."""
    found = {(cell.way, cell.compute): cell for cell in cells}

    def methods(way: str) -> str | None:
        used = {name for cell in cells if cell.way == way for name in cell.copy_methods}
        return "/".join(sorted(used)) or None

    def lost(compute: str) -> Callable[[str], object]:
        return lambda way: found[way, compute].lost

    def speed(compute: str) -> Callable[[str], object]:
        return lambda way: found[way, compute].gb_per_s

    columns: list[Column[str]] = [Column("way", str), Column("method", methods)]
    for compute in dict.fromkeys(cell.compute for cell in cells):
        columns += [Column(f"{compute}: ms", lost(compute)), Column("GB/s", speed(compute))]
    return table_of(columns, dict.fromkeys(cell.way for cell in cells))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
