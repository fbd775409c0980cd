"""Times store() and load() on a device that torch drives, beside the bare operations of torch.

Two times of each call: "idle", when nothing is submitted to the device, and "behind work", when the
caller's stream still has something to do, so that an event is recorded on it. "By hand" is what the
call comes down to, without this library: an event on the caller's stream and a wait for it, the ids
sent to the device, one gather or scatter for each layer, and one copy for each page. What it costs
depends on the torch of the device's vendor, and on how busy the interpreter is. All three run in
changing order. After each cell the call and the copies by hand run once more, each over other
bytes, and what they have copied is compared.

With --fake-accelerator it runs on the device of tests/support/fake_accelerator, whose streams are
threads: the figures then compare this library with bare torch, and say nothing of any device.

Ends with 1 when bytes are wrong, else with 0.
"""

from __future__ import annotations

import sys
import time
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from itertools import groupby
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # a checkout need not be installed

import torch
from report import write_json
from timing import Spread, in_turn, new_samples
from torch import Tensor

from torch_kvswap import HostPool, OffloadHandler, PagedLayout

SUPPORT = Path(__file__).parents[1] / "tests" / "support"
LAYERS, NUMEL = 8, 4096  # 8 KiB a block in each layer
NUM_BLOCKS = 128


@dataclass(frozen=True)
class Cell:
    """What the calls took. wrong: blocks and pages that a call, or the copies by hand, left with
    wrong bytes."""

    blocks: int
    direction: str
    idle: Spread
    behind_work: Spread
    by_hand: Spread
    wrong: int


def main(arguments: list[str]) -> int:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--device", help="type of the device; default: the accelerator of torch")
    parser.add_argument("--fake-accelerator", action="store_true")
    parser.add_argument("--blocks", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--samples", type=int, default=200)
    parser.add_argument("--json", type=Path, help="where the figures go")
    options = parser.parse_args(arguments)
    if options.fake_accelerator:
        sys.path.insert(0, str(SUPPORT))
        import_module("fake_accelerator").load()
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    kind = options.device or (accelerator.type if accelerator else None)
    if kind in (None, "cpu", "cuda"):
        parser.error("this needs a device that torch drives; --fake-accelerator makes one")
    cells = [
        measure(kind, direction, blocks, options.samples)
        for blocks in options.blocks
        for direction in ("store", "load")
    ]
    wrong = sum(cell.wrong for cell in cells)
    print("microseconds in the call, medians\n", table(cells), sep="\n")
    print(f"\nblocks and pages with wrong bytes: {wrong}")
    if options.json:
        settings = {"layers": LAYERS, "layer_bytes": 2 * NUMEL, "samples": options.samples}
        content = {
            "benchmark": "generic_submit",
            "settings": {"device": kind, "num_blocks": NUM_BLOCKS, **settings},
            "cells": list(map(asdict, cells)),
        }
        write_json(options.json, torch.device(kind), content, [])
    return 1 if wrong else 0


def table(cells: Sequence[Cell]) -> str:
    """As docs/devices.md has it: a row for each number of blocks."""
    directions = list(dict.fromkeys(cell.direction for cell in cells))
    titles = [f"{direction}, idle / behind work / by hand" for direction in directions]
    lines = [" | ".join(["| blocks", *titles, ""]), "|---" * (1 + len(titles)) + "|"]
    for blocks, of_row in groupby(cells, lambda cell: cell.blocks):
        times = [[cell.idle, cell.behind_work, cell.by_hand] for cell in of_row]
        figures = [" / ".join(f"{one.median:.0f}" for one in of_cell) for of_cell in times]
        lines.append(" | ".join([f"| {blocks}", *figures, ""]))
    return "\n".join(line.rstrip() for line in lines)


def measure(kind: str, direction: str, blocks: int, samples: int) -> Cell:
    contents = torch.arange(LAYERS * NUM_BLOCKS * NUMEL) % 251  # exact in bfloat16
    caches = contents.view(LAYERS, NUM_BLOCKS, NUMEL).to(torch.bfloat16)
    tensors = [cache.to(kind) for cache in caches]
    layout = PagedLayout(tensors)
    pool = HostPool(layout, NUM_BLOCKS)
    pages = list(range(0, 2 * blocks, 2))  # none beside another: a copy for each
    ids = list(range(blocks))
    side, event = torch.Stream(device=kind), torch.Event(kind)
    times = [new_samples(samples) for _ in range(3)]
    with OffloadHandler(layout, pool) as handler:

        def call() -> None:
            if direction == "store":
                handler.store(gpu_block_ids=ids, page_ids=pages)
            else:
                handler.load(page_ids=pages, gpu_block_ids=ids)

        plain = plain_torch(tensors, pool.pages.flatten(1), direction, ids, pages, side, event)

        def wait() -> None:
            torch.accelerator.synchronize()
            handler.synchronize()
            handler.poll()

        for sample in range(samples):
            for number, run in in_turn(list(enumerate((call, call, plain))), sample):
                wait()
                if number == 1:
                    for tensor in tensors:
                        tensor.add_(0)
                began = time.perf_counter_ns()
                run()
                times[number][sample] = time.perf_counter_ns() - began
        wrong = 0
        for run in (call, plain):
            wait()
            pool.pages.random_(256)
            run()
            wait()
            found = torch.stack([tensor[:blocks].cpu() for tensor in tensors], 1).view(torch.uint8)
            wrong += int((found.flatten(1) != pool.pages[pages].flatten(1)).any(1).sum())
    idle, behind_work, by_hand = map(Spread.of, times)
    return Cell(blocks, direction, idle, behind_work, by_hand, wrong)


def plain_torch(
    tensors: list[Tensor],
    pages: Tensor,
    direction: str,
    ids: list[int],
    page_ids: list[int],
    side: torch.Stream,
    event: torch.Event,
) -> Callable[[], None]:
    """The same copies, on a stream beside the current one."""
    width = tensors[0].shape[1] * tensors[0].element_size()
    pinned = torch.tensor(ids).pin_memory()
    on_device = torch.empty_like(pinned, device=tensors[0].device)
    staging = torch.empty(
        len(ids), len(tensors) * width, dtype=torch.uint8, device=tensors[0].device
    )
    views = [tensor.view(torch.uint8) for tensor in tensors]

    def run() -> None:
        event.record(torch.accelerator.current_stream())
        with side:
            side.wait_event(event)
            on_device.copy_(pinned, non_blocking=True)
            if direction == "load":
                for row, page in enumerate(page_ids):
                    staging[row].copy_(pages[page], non_blocking=True)
            for layer, view in enumerate(views):
                part = staging[:, layer * width : (layer + 1) * width]
                if direction == "store":
                    part.copy_(view.index_select(0, on_device))
                else:
                    view.index_copy_(0, on_device, part)
            if direction == "store":
                for row, page in enumerate(page_ids):
                    pages[page].copy_(staging[row], non_blocking=True)

    return run


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
