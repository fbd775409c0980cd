"""Makes host pools, and says how soon they are ready beside torch's pinned memory.

Each way makes memory of --gib once to warm up and then --samples times, in changing order: pools
as they are by default, in the background (ready when the first chunk is), on small pages, shared
between processes; and torch.empty(pin_memory=True), whose cache is emptied in between. Without a
GPU nothing is pinned, so that no memory is there before it is used. A byte of each page of the
pools is looked at; one that is not zero is wrong.
"""

from __future__ import annotations

import sys
import time
from argparse import ArgumentParser
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # a checkout need not be installed

import torch
from program import device_of, finish, is_judged, new_parser
from report import Column, Verdict, table_of
from timing import in_turn, no_garbage_collection, summary
from torch import Tensor

from torch_kvswap import HostPool, PagedLayout
from torch_kvswap.cli.progress import Progress

PAGE = 2 << 20
TORCH = "torch"  # what the others are compared with
SHARE = 0.25  # of torch's time, for a pool as it is by default
OPTIONS: dict[str, dict[str, bool]] = {
    "HostPool": {},
    "first chunk, background": {"pin_in_background": True},
    "small pages": {"huge_pages": False},
    "shared": {"shared": True},
}
Way = Callable[[int], tuple[Tensor, HostPool | None]]


@dataclass
class Cell:
    """Samples of one way to make nbytes, in seconds. huge_share: of them on huge pages, None where
    nobody says. wrong: samples that were not zero."""

    name: str
    nbytes: int
    ready: list[float] = field(default_factory=list)
    huge_share: float | None = None
    wrong: int = 0

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "ready": summary(self.ready)}


CELLS: list[Column[Cell]] = [
    Column("memory", lambda cell: cell.name),
    Column("GiB", lambda cell: cell.nbytes / 2**30),
    Column("ready, s", lambda cell: median(cell.ready)),
    Column("huge share", lambda cell: cell.huge_share),
]


def main(arguments: list[str]) -> int:
    options = _parser().parse_args(arguments)
    device = device_of(options)
    nbytes = int((options.gib or (16 if device.type == "cuda" else 1)) * 2**30) // PAGE * PAGE
    cells = measure(ways(device), nbytes, options.samples)
    verdicts = judge(cells) if is_judged(options) else []
    print(table_of(CELLS, cells), "", *verdicts, sep="\n")
    content = {
        "benchmark": "host_memory",
        "settings": {"samples": options.samples, "nbytes": nbytes},
        "cells": [cell.to_json() for cell in cells],
    }
    return finish(options, content, verdicts, sum(cell.wrong for cell in cells))


def _parser() -> ArgumentParser:
    parser = new_parser(__doc__)
    add = parser.add_argument
    add("--gib", type=float, help="of memory: 16, without a GPU 1")
    add("--samples", type=int, default=3, help="of each way, after one that warms up")
    return parser


def ways(device: torch.device) -> dict[str, Way]:
    layout = PagedLayout([torch.zeros(1, PAGE, dtype=torch.uint8, device=device)])
    on_cuda = device.type == "cuda"

    def by_torch(nbytes: int) -> tuple[Tensor, None]:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=on_cuda), None

    def pool(options: dict[str, Any]) -> Way:
        def make(nbytes: int) -> tuple[Tensor, HostPool]:
            made = HostPool(layout, nbytes // PAGE, pinned=on_cuda, **options)
            return made.pages.view(-1), made

        return make

    pools = {
        name: pool(options)
        for name, options in OPTIONS.items()
        if on_cuda or "pin_in_background" not in options
    }
    return {TORCH: by_torch, **pools}


def measure(ways: dict[str, Way], nbytes: int, samples: int) -> list[Cell]:
    cells = [Cell(name, nbytes) for name in ways]
    progress = Progress("host memory", (samples + 1) * len(ways), sys.stderr)
    for number in range(-1, samples):
        for cell in in_turn(cells, number):
            take(cell, ways[cell.name], number >= 0)
            progress.advance(1)
    return cells


def take(cell: Cell, make: Way, counts: bool) -> None:
    with no_garbage_collection():
        start = time.perf_counter()
        memory, pool = make(cell.nbytes)
        ready = time.perf_counter() - start
    if pool is not None:
        pool.wait_ready()
        cell.huge_share = pool.huge_bytes / cell.nbytes
    if cell.name != TORCH:  # which leaves its memory as it is
        cell.wrong += int(memory[:: 4096 - 1].any())
    if pool is not None:
        pool.close()
    del memory, pool
    if cell.name == TORCH and torch.cuda.is_initialized():
        empty_pinned_cache()
    if counts:
        cell.ready.append(ready)


def empty_pinned_cache() -> None:
    """Else torch would hand out the memory of the sample before."""
    for module, name in ((torch.accelerator, "empty_host_cache"), (torch._C, "_host_emptyCache")):
        if hasattr(module, name):
            getattr(module, name)()
            return
    raise RuntimeError("this torch has no call that lets its pinned memory go")


def judge(cells: list[Cell]) -> list[Verdict]:
    ready = {cell.name: median(cell.ready) for cell in cells}
    share = ready["HostPool"] / ready[TORCH]
    return [Verdict("HostPool, time until ready over torch's", SHARE, share)]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
