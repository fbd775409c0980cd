"""Tests of handlers on the fake accelerator, each with a device queue of its own."""

from __future__ import annotations

import functools
import gc
import textwrap
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from fake_accelerator import DEVICE_TYPE, Accelerator, on_fake_accelerator
from fake_accelerator.tests import environment
from processes import run_script

if TYPE_CHECKING:
    from torch_kvswap.devices.queue import DeviceQueue
    from torch_kvswap.offload.handler import Job, OffloadHandler

DEVICE = f"{DEVICE_TYPE}:0"
BLOCKS, PAGES, ROW = 8, 6, 32


def on_queued_device(body: Callable[..., None]) -> Callable[..., None]:
    """Decorates a test as on_fake_accelerator() does. Handlers that other tests have left, and
    devices that they have lost, do not matter to it."""

    @functools.wraps(body)
    def with_new_queue(accelerator: Accelerator, **arguments: object) -> None:
        forget_queues()
        try:
            body(accelerator, **arguments)
        finally:
            gc.collect()  # handlers are closed while their queue works
            forget_queues()

    return on_fake_accelerator(with_new_queue)


def forget_queues() -> None:
    """The next handler of each device makes a new queue, as in a new process. Frees what lost devices
    have left, on which nothing runs any more."""
    from torch_kvswap._native.kept import let_go
    from torch_kvswap.devices import queue

    for one in queue._queues.values():
        one.stop()
        let_go(one)
    queue._queues.clear()


class Rows:
    """A cache of BLOCKS blocks on the device, each filled with its number, and its handler."""

    def __init__(self, *, tensors: int = 1, **options: Any) -> None:
        from torch_kvswap import HostPool, OffloadHandler, PagedLayout

        numbers = torch.arange(BLOCKS, dtype=torch.int32).view(-1, 1).expand(BLOCKS, ROW)
        self.tensors = [numbers.contiguous().to(DEVICE) for _ in range(tensors)]
        self.layout = PagedLayout(self.tensors)
        self.pool = HostPool(self.layout, PAGES)
        self.handler = OffloadHandler(self.layout, self.pool, **options)
        torch.accelerator.synchronize()

    def write(self, block: int, value: int, stream: torch.Stream | None = None) -> None:
        """A kernel that fills a block."""
        with stream or current():
            for tensor in self.tensors:
                tensor[block].fill_(value)

    def page(self, page: int) -> set[int]:
        """The numbers in a page."""
        return set(self.pool.pages[page].view(torch.int32).flatten().tolist())

    def set_page(self, page: int, value: int) -> None:
        self.pool.pages[page].view(torch.int32).fill_(value)

    def block(self, block: int) -> set[int]:
        """The numbers in a block."""
        return {int(n) for tensor in self.tensors for n in tensor[block].cpu().tolist()}

    def store(self, block: int, page: int, **options: Any) -> Job:
        return self.handler.store(gpu_block_ids=[block], page_ids=[page], **options)

    def load(self, page: int, block: int, **options: Any) -> Job:
        return self.handler.load(page_ids=[page], gpu_block_ids=[block], **options)


def run_on_device(script: str, *arguments: str) -> str:
    """Runs a script in a process of its own, with `accelerator`; returns what it printed."""
    environment()  # builds the accelerator, which takes longer than a script may
    prepared = "import fake_accelerator\naccelerator = fake_accelerator.load()\n"
    return run_script(prepared + textwrap.dedent(script), *arguments)


def queue_of(handler: OffloadHandler) -> DeviceQueue:
    found = handler._native.groups.queue
    assert found is not None
    return found


def current() -> torch.Stream:
    return torch.accelerator.current_stream(DEVICE)
