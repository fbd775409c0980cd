"""Makes host pools, and says how soon they are ready beside torch's pinned memory.

Each way makes memory of --gib once to warm up and then --samples times, in changing order: pools
as they are by default, in the background (ready when the first chunk is), on small pages, shared
between processes; and torch.empty(pin_memory=True), whose cache is emptied in between. Then a
matrix is multiplied, step after step, while a pool is pinned in the background: what that costs the
compute. Without a GPU the memory is touched, not pinned, beside torch.zeros().fill_(0), and nothing
is judged. A byte of each page of the memory is looked at; one that is not zero is wrong. Ends with
1 when memory is wrong, else with 0, whether or not the target is met.
"""

from __future__ import annotations

import sys
import time
from argparse import ArgumentParser
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # a checkout need not be installed

import torch
from host_memory_report import Beside, Cell, judge, tables
from program import device_of, finish, is_judged, new_parser
from timing import in_turn, no_garbage_collection, resident_bytes, synchronize
from torch import Tensor

from torch_kvswap import HostPool, PagedLayout
from torch_kvswap.cli.progress import Progress
from torch_kvswap.host_pool.memory import Mapping, map_new

PAGE = 2 << 20
TORCH = "torch"  # what the others are compared with
Memory = tuple[Tensor, Any]  # and who knows its huge pages
Way = Callable[[int], Memory]


def main(arguments: list[str]) -> int:
    options = _parser().parse_args(arguments)
    device = device_of(options)
    on_cuda = device.type == "cuda"
    nbytes = int((options.gib or (16 if on_cuda else 1)) * 2**30) // PAGE * PAGE
    ways = pinned_ways(device) if on_cuda else touched_ways()
    cells = measure(ways, nbytes, options.samples)
    beside = measure_beside(device, nbytes, options.seconds)
    verdicts = judge(cells) if is_judged(device) else []
    print(tables(cells, beside), "", *verdicts, sep="\n")
    content = {
        "benchmark": "host_memory",
        "settings": {"samples": options.samples, "nbytes": nbytes},
        "cells": [cell.to_json() for cell in cells],
        "beside": beside.to_json(),
    }
    return finish(options, content, verdicts, sum(cell.wrong for cell in cells))


def _parser() -> ArgumentParser:
    parser = new_parser(__doc__)
    add = parser.add_argument
    add("--gib", type=float, help="of memory: 16, without a GPU 1")
    add("--samples", type=int, default=3, help="of each way, after one that warms up")
    add("--seconds", type=float, default=1.0, help="of compute with nothing beside it")
    return parser


def pinned_ways(device: torch.device) -> dict[str, Way]:
    layout = PagedLayout([torch.zeros(1, PAGE, dtype=torch.uint8, device=device)])

    def way(**options: Any) -> Way:
        def make(nbytes: int) -> Memory:
            pool = HostPool(layout, nbytes // PAGE, pinned=True, **options)
            return pool.pages.view(-1), pool

        return make

    return {
        TORCH: lambda nbytes: (torch.empty(nbytes, dtype=torch.uint8, pin_memory=True), None),
        "HostPool": way(),
        "first chunk, background": way(pin_in_background=True),
        "small pages": way(huge_pages=False),
        "shared": way(shared=True),
    }


def touched_ways() -> dict[str, Way]:
    def way(shared: bool = False, huge_pages: bool | None = None) -> Way:
        def make(nbytes: int) -> Memory:
            mapping = map_new(nbytes, huge_pages, shared=shared)
            mapping.touch(0, nbytes)
            return mapping.tensor, mapping

        return make

    return {
        TORCH: lambda nbytes: (torch.zeros(nbytes, dtype=torch.uint8).fill_(0), None),
        "HostPool": way(),
        "small pages": way(huge_pages=False),
        "shared": way(shared=True),
        "shared, small pages": way(True, False),
    }


def measure(ways: dict[str, Way], nbytes: int, samples: int) -> list[Cell]:
    cells = [Cell(name, nbytes) for name in ways]
    progress = Progress("host memory", (samples + 1) * len(ways), sys.stderr)
    for number in range(-1, samples):
        for cell in in_turn(cells, number):
            take(cell, ways[cell.name], number >= 0)
            progress.advance(1)
    return cells


def take(cell: Cell, make: Way, counts: bool) -> None:
    before = resident_bytes()
    with no_garbage_collection():
        start = time.perf_counter()
        memory, owner = make(cell.nbytes)
        ready = time.perf_counter() - start
    if isinstance(owner, HostPool):
        owner.wait_ready()
    resident = resident_bytes() - before
    huge = owner.huge_bytes if owner is not None else None
    if cell.name != TORCH:  # which leaves its memory as it is
        cell.wrong += int(memory[:: 4096 - 1].any())
    start = time.perf_counter()
    if isinstance(owner, HostPool):
        owner.close()
    del memory, owner
    if cell.name == TORCH and torch.cuda.is_initialized():
        empty_pinned_cache()
    if counts:
        cell.add(ready, time.perf_counter() - start, resident, huge)


def empty_pinned_cache() -> None:
    """Else torch would hand out the memory of the sample before."""
    for module, name in ((torch.accelerator, "empty_host_cache"), (torch._C, "_host_emptyCache")):
        if hasattr(module, name):
            getattr(module, name)()
            return
    raise RuntimeError("this torch has no call that lets its pinned memory go")


def measure_beside(device: torch.device, nbytes: int, seconds: float) -> Beside:
    """Steps of compute alone, and while a pool is pinned or, without a GPU, touched."""
    step = new_step(device)
    alone = steps_until(step, time.perf_counter() + seconds)
    layout = PagedLayout([torch.zeros(1, PAGE, dtype=torch.uint8, device=device)])
    start = time.perf_counter()
    if device.type == "cuda":
        pool = HostPool(layout, nbytes // PAGE, pin_in_background=True)
        during = steps_until(step, lambda: pool.is_ready)
        took = time.perf_counter() - start
        pool.close()
    else:
        mapping = Mapping(nbytes)
        thread = Thread(target=mapping.touch, args=(0, nbytes))
        thread.start()
        during = steps_until(step, lambda: not thread.is_alive())
        took = time.perf_counter() - start
    return Beside(alone, during, took)


def new_step(device: torch.device) -> Callable[[], None]:
    """Some products on the device, submitted one by one, as a decode step of an engine is."""
    on_cuda = device.type == "cuda"
    size, dtype = (8192, torch.bfloat16) if on_cuda else (256, torch.float32)
    weights = torch.zeros(size, size, device=device, dtype=dtype)
    tokens = torch.zeros(64, size, device=device, dtype=dtype)

    def step() -> None:
        for _ in range(8):
            torch.mm(tokens, weights)
        synchronize(device)

    for _ in range(20):
        step()
    return step


def steps_until(step: Callable[[], None], end: float | Callable[[], bool]) -> list[float]:
    """Microseconds of each step, one at least."""
    taken: list[float] = []
    is_over = end if callable(end) else lambda: time.perf_counter() > end
    while not taken or not is_over():
        start = time.perf_counter()
        step()
        taken.append((time.perf_counter() - start) * 1e6)
    return taken


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
