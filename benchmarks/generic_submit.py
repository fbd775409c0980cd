"""Times store() and load() on a device that torch drives, beside the bare operations of torch.

Two times of each call: "idle", when nothing is submitted to the device, and "behind work", when the
caller's stream still has something to do, so that an event is recorded on it. "torch" is what the
call comes down to, without this library: an event on the caller's stream and a wait for it, the ids
sent to the device, one gather or scatter for each layer, and one copy for each page. What it costs
depends on the torch of the device's vendor, and on how busy the interpreter is.

With --fake-accelerator it runs on the device of tests/support/fake_accelerator, whose streams are
threads: the figures then compare this library with bare torch, and say nothing of any device.
"""

from __future__ import annotations

import sys
import time
from argparse import ArgumentParser
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[1]))  # a checkout need not be installed

import torch
from torch import Tensor

from torch_kvswap import HostPool, OffloadHandler, PagedLayout

SUPPORT = Path(__file__).parents[1] / "tests" / "support"
LAYERS, NUMEL = 8, 4096  # 8 KiB a block in each layer
NUM_BLOCKS = 128


def main(arguments: list[str]) -> int:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--device", help="type of the device; default: the accelerator of torch")
    parser.add_argument("--fake-accelerator", action="store_true")
    parser.add_argument("--blocks", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--samples", type=int, default=200)
    options = parser.parse_args(arguments)
    if options.fake_accelerator:
        sys.path.insert(0, str(SUPPORT))
        import_module("fake_accelerator").load()
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    kind = options.device or (accelerator.type if accelerator else None)
    if kind in (None, "cpu", "cuda"):
        parser.error("this needs a device that torch drives; --fake-accelerator makes one")
    print("microseconds, median of a call   idle   behind work   torch")
    for blocks in options.blocks:
        for direction in ("store", "load"):
            figures = measure(kind, direction, blocks, options.samples)
            cells = "".join(f"{1e6 * seconds:12.0f}" for seconds in figures)
            print(f"{direction:6}{blocks:4} blocks        {cells}")
    return 0


def measure(kind: str, direction: str, blocks: int, samples: int) -> list[float]:
    """Seconds of a call: idle, behind work, and of bare torch."""
    tensors = [
        torch.zeros(NUM_BLOCKS, NUMEL, dtype=torch.bfloat16, device=kind) for _ in range(LAYERS)
    ]
    layout = PagedLayout(tensors)
    pool = HostPool(layout, NUM_BLOCKS)
    pages = list(range(0, 2 * blocks, 2))  # none beside another: a copy for each
    ids = list(range(blocks))
    side, event = torch.Stream(device=kind), torch.Event(kind)
    times: list[list[float]] = [[], [], []]
    with OffloadHandler(layout, pool) as handler:

        def call() -> None:
            if direction == "store":
                handler.store(gpu_block_ids=ids, page_ids=pages)
            else:
                handler.load(page_ids=pages, gpu_block_ids=ids)

        plain = plain_torch(tensors, pool.pages.flatten(1), direction, ids, pages, side, event)
        for _ in range(samples):
            for number, run in enumerate((call, call, plain)):
                torch.accelerator.synchronize()
                handler.synchronize()
                handler.poll()
                if number == 1:
                    for tensor in tensors:
                        tensor.add_(1)
                began = time.perf_counter()
                run()
                times[number].append(time.perf_counter() - began)
        torch.accelerator.synchronize()
    return [median(of) for of in times]


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
