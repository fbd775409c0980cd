"""Runs compute beside transfers: what it loses for each GB moved, and how fast they are meanwhile.

The compute is on a stream of the default priority: a decode GEMM, attention over a cache, a kernel
bound by memory, a prefill, and a GEMM whose kernels hold every SM. Beside it goes one transfer of
scattered blocks after another, two at a time, by the handler as it chooses, with a forced copy
method, or with `copy_method="copy_engines"`; one big pinned copy after another; and one after
another by PyTorch, with the guarantees of a transfer (the reference of bandwidth.py). "kernel" is
the method with which an SM kernel copies. In each repeat the compute runs alone once and then
beside each of them, in changing order; figures are medians of the repeats. Transfers follow each
other at once, so there is nothing cold here. Without a GPU a thread computes and nothing is
judged. All bytes are compared in the end. Ends with 1 when bytes are wrong, else with 0, whether
or not the targets are met.
"""

from __future__ import annotations

import os
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # a checkout need not be installed

import torch
from big_copy import BigCopy, Reference
from computes import Compute, Idle, computes
from interference_report import BIG, COPY_ENGINES_ONLY, REFERENCE, Cell, Sample, judge, tables
from program import device_of, finish, is_judged, new_parser
from timing import TimeLimit, in_turn, no_garbage_collection, synchronize
from traffic import BigWay, HandlerWay, ReferenceWay, Way, beside
from transfers import DIRECTIONS, Shape, add_transfers, shapes_of

from torch_kvswap import OffloadHandler
from torch_kvswap.cli.progress import Progress
from torch_kvswap.copy_method import DEFAULT_STAGING_BYTES

SHAPES = ("160x8", "160x4")
FORCED = ("staged", "kernel")
CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"  # hardware queues, which streams share
LEAST = 2  # repeats that a limit of time leaves


def main(arguments: list[str]) -> int:
    options = _parser().parse_args(arguments)
    device = device_of(options)
    on_cuda = device.type == "cuda"
    shapes = shapes_of(options, on_cuda, SHAPES, on_cpu=1)
    options.seconds = options.seconds or (0.06 if on_cuda else 0.02)
    options.mib = options.mib or (128 if on_cuda else 4)
    cells, wrong = measure_all(device, shapes, options)
    verdicts = judge(cells) if is_judged(device) else []
    print(tables(cells), "", *verdicts, "", sep="\n")
    names = ("repeats", "seconds", "mib", "arrangements", "staging_mib", "time_limit")
    settings = {name: getattr(options, name) for name in names}
    settings[CONNECTIONS] = os.environ.get(CONNECTIONS)
    content = {
        "benchmark": "interference",
        "settings": settings,
        "cells": [cell.to_json() for cell in cells],
    }
    return finish(options, content, verdicts, wrong)


def _parser() -> ArgumentParser:
    parser = new_parser(__doc__)
    add = parser.add_argument
    add("--repeats", type=int, default=4, help="after one that warms up")
    add("--seconds", type=float, help="of compute in a sample")
    add("--mib", type=int, help="in a transfer")
    add_transfers(parser)
    add("--staging-mib", type=int, default=DEFAULT_STAGING_BYTES >> 20, help="of a handler")
    text = f"for the whole program; cells then have fewer repeats, but {LEAST} at least"
    add("--time-limit", type=float, metavar="SECONDS", help=text)
    return parser


def measure_all(
    device: torch.device, shapes: Sequence[Shape], options: Namespace
) -> tuple[list[Cell], int]:
    """The cells; and the blocks and pages with wrong bytes."""
    nbytes = options.mib << 20
    beside_what = computes(device, options.seconds)  # before there are handlers: it captures graphs
    big = BigCopy(device, nbytes)
    reference = Reference(big, device)
    links = {way: _link(big, way, nbytes, options.seconds, options.repeats) for way in DIRECTIONS}
    kinds = list(product(DIRECTIONS, beside_what))
    number = len(options.arrangements) * len(shapes) * len(kinds)
    limit = TimeLimit(options.time_limit, number)
    progress = Progress("interference", number, sys.stderr)
    cells, wrong = [], 0
    for arrangement, shape in product(options.arrangements, shapes):
        count = max(1, nbytes // shape.block_bytes)
        blocks = shape.new_blocks(device, 3 * count + 2, arrangement)  # a third does not move
        with ExitStack() as stack:
            stack.enter_context(blocks.host)
            handlers = _handlers(blocks, options.staging_mib << 20, stack)
            for direction, compute in kinds:
                ways: dict[str, Way] = {
                    BIG: BigWay(big, direction, nbytes),
                    REFERENCE: ReferenceWay(reference, direction, nbytes),
                }
                for name, handler in handlers.items():
                    copy_method = "copy_engines" if name == COPY_ENGINES_ONLY else None
                    ways[name] = HandlerWay(handler, blocks, direction, count, copy_method)
                samples = measure(compute, ways, options.repeats, limit.next_part())
                for name, taken in samples.items():
                    used = sorted(getattr(ways[name], "copy_methods", ()))
                    link, kind = links[direction], (shape, arrangement, direction)
                    cells.append(Cell(*kind, compute.name, name, taken, used, link))
                progress.advance(1)
            synchronize(device)
            wrong += blocks.wrong()
    return cells, wrong


def _handlers(blocks: Any, staging_bytes: int, stack: ExitStack) -> dict[str, OffloadHandler]:
    """By way; the methods that cannot be had are left out."""
    handlers = {}
    for copy_method in ("auto", *(FORCED if blocks.device.type == "cuda" else ())):
        try:
            handler = OffloadHandler(
                blocks.layout, blocks.host, copy_method=copy_method, staging_bytes=staging_bytes
            )
        except ValueError as error:
            print(f"{copy_method} cannot be had: {error}")
            continue
        handlers[copy_method] = stack.enter_context(handler)
    return {**handlers, COPY_ENGINES_ONLY: handlers["auto"]}


def _link(big: BigCopy, direction: str, nbytes: int, seconds: float, repeats: int) -> float:
    """GB/s of big copies with nothing beside them."""
    way = BigWay(big, direction, nbytes)
    beside(Idle(seconds), way)  # touches the memory
    return median(beside(Idle(seconds), way)[2] for _ in range(repeats))


def measure(
    compute: Compute, ways: Mapping[str, Way], repeats: int, end: float
) -> dict[str, list[Sample]]:
    """end: after that time of perf_counter() no repeat begins once there are LEAST samples."""
    samples: dict[str, list[Sample]] = {name: [] for name in ways}
    with no_garbage_collection():
        for repeat in range(repeats + 1):
            if repeat > LEAST and time.perf_counter() > end:
                break
            floor = beside(compute, None)[0]
            for name in in_turn(list(ways), repeat):
                sample = Sample(floor, *beside(compute, ways[name]))
                if repeat > 0:
                    samples[name].append(sample)
    return samples


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
