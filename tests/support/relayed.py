"""A cache on the simulated driver whose handler has relays, and what its bytes should be."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from patience import PATIENCE
from simulated_cache import run_until
from simulated_driver import Driver, on_device
from staged_bytes import numbers
from torch import Tensor

from torch_kvswap import DeviceLostError, HostPool
from torch_kvswap.offload import relays as relays_module
from torch_kvswap.offload.handler import Job, OffloadHandler

KEPT: list[RelayedCache] = []  # until the process ends: GPU 0 waits for a lost relay for ever
LAYERS, BLOCKS, FRAGMENT = 2, 40, 1 << 15
LARGE = list(range(4, 36))  # 2 MiB; relays take part from 128 KiB on


@contextmanager
def gain_of(gain: float) -> Iterator[None]:
    """All relays gain as much: the links of the simulated driver have no speed to be measured."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(relays_module, "measured_gain", lambda own, peer: gain)
        yield


def relayed_handler(
    *arguments: Any,
    relays: Sequence[int] = (1,),
    gain: float = 2.0,
    make: type[OffloadHandler] = OffloadHandler,
    **options: Any,
) -> OffloadHandler:
    """A handler of staged copies with relays."""
    options = {"copy_method": "staged", "staging_bytes": 1 << 20, **options}
    with gain_of(gain):
        return make(*arguments, relays=relays, **options)


class RelayedCache:
    """Random bytes on GPU 0 and in a host pool. A store or load changes what is expected, in the order
    of submission."""

    def __init__(self, driver: Driver, relays: Sequence[int] = (1,), **options: Any) -> None:
        self.driver = driver
        self.whole = numbers(LAYERS, BLOCKS, FRAGMENT)
        self.layout = on_device(driver, self.whole)
        self.pool = HostPool(self.layout, num_pages=BLOCKS)
        self.pages = self.pool.pages.view(BLOCKS, LAYERS, FRAGMENT)
        self.pages.copy_(numbers(BLOCKS, LAYERS, FRAGMENT))
        self.expected_blocks = self.blocks()
        self.expected_pages = self.pages.clone()
        self.handler = relayed_handler(self.layout, self.pool, relays=relays, **options)
        driver.set_mode("manual")

    def store(self, blocks: Sequence[int], pages: Sequence[int], **options: Any) -> Job:
        self.expected_pages[list(pages)] = self.expected_blocks[list(blocks)]
        return self.handler.store(gpu_block_ids=blocks, page_ids=pages, after=(), **options)

    def load(self, pages: Sequence[int], blocks: Sequence[int], **options: Any) -> Job:
        self.expected_blocks[list(blocks)] = self.expected_pages[list(pages)]
        return self.handler.load(page_ids=pages, gpu_block_ids=blocks, after=(), **options)

    def submit(self, kind: str, blocks: Sequence[int], pages: Sequence[int], **options: Any) -> Job:
        if kind == "store":
            return self.store(blocks, pages, **options)
        return self.load(pages, blocks, **options)

    def blocks(self) -> Tensor:
        """[blocks, layers, bytes]"""
        return self.whole.transpose(0, 1).contiguous()

    def is_right(self) -> bool:
        return torch.equal(self.blocks(), self.expected_blocks) and torch.equal(
            self.pages, self.expected_pages
        )

    def relayed(self, kind: str) -> int:
        """Bytes that relays were given."""
        metrics = self.handler.metrics()
        channel = metrics.stores if kind == "store" else metrics.loads
        return sum(channel.relayed_bytes.values())

    def finish(self, *jobs: Job) -> None:
        for job in jobs:
            run_until(self.driver, job.query, PATIENCE)

    def __enter__(self) -> RelayedCache:
        return self

    def __exit__(self, failure: object, *_: object) -> None:
        self.driver.set_mode("immediate")
        if failure is None:
            try:
                self.handler.close()
            except DeviceLostError:
                KEPT.append(self)
