"""Two handlers that store and load the same pages, like engines of two processes: nothing orders
their jobs. A load may find one block's first layers and another's last ones in a page.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from unittest import mock

import torch
from drained import drain
from encoded_cache import METHODS, EncodedCache
from fuzz_cache import MismatchError
from logged import logged
from torch import Tensor

from torch_kvswap import CorruptedPageError, Job, OffloadHandler, Result

if TYPE_CHECKING:
    from simulated_driver import Driver

BLOCKS, PAGES, LAYERS = 8, 4, 3  # blocks of each handler


@dataclass(eq=False)
class Submitted:
    """A job. `moves` are of blocks and pages.

    Attributes:
        contents (dict[int, list[Tensor]]): what the page of a load may have, by page: the blocks of
            its latest stores, and of those that were submitted before the load was reported.
        is_alone (bool): of a store: no other store of its pages was open.
    """

    job: Job
    moves: list[tuple[int, int]]
    contents: dict[int, list[Tensor]] = field(default_factory=dict)
    is_alone: bool = True


class Torn:
    """Random jobs of two handlers on the pages of a pool.

    Args:
        driver: whose GPU has the cache, in manual mode. None is the CPU, where jobs of the first
            handler are late, and those of the other one are not.
        seed: of everything random.
        verify: of the pool. "off" is a control.
        encoding: of the pool.
    """

    def __init__(
        self, driver: Driver | None, seed: int, verify: str = "load", encoding: str = "raw"
    ) -> None:
        self.rng, self.driver = random.Random(f"{seed} torn"), driver
        torch.manual_seed(seed)
        self.method = "auto" if driver is None else self.rng.choice(METHODS)
        if driver is not None:
            driver.reset()
        how = {"encodings": [encoding], "verify": verify, "copy_method": self.method}
        with mock.patch.dict(os.environ, KVSWAP_LATE_CPU="1"):
            self.cache = EncodedCache(driver, blocks=2 * BLOCKS, pages=PAGES, layers=LAYERS, **how)
        (layout,), (pool,) = self.cache.layouts, self.cache.pools
        self.handlers = [self.cache.handler, OffloadHandler(layout, pool, copy_method=self.method)]
        self.open: list[dict[int, Submitted]] = [{}, {}]  # of each handler, by number of the job
        self.contents: dict[int, list[Tensor]] = {page: [] for page in range(PAGES)}
        self.counts: Counter[str] = Counter()

    def run(self) -> Counter[str]:
        with logged(), self.cache, self.handlers[1]:
            self._store(0, list(range(PAGES)))  # no page is empty from here on
            self._drain(0)
            for _ in range(200):
                number = self.rng.randrange(2)
                pages = self.rng.sample(range(PAGES), self.rng.choice([1, 1, 2]))
                if self.rng.random() < 0.1:
                    self._drain(number)
                elif self.rng.random() < 0.4:
                    self._store(number, pages)
                else:
                    self._load(number, pages)
                self._go_on()
            for number in range(2):
                self._drain(number)
        return self.counts

    def __str__(self) -> str:
        return f"{self.cache.pools[0]}, {self.method}"

    def _free_blocks(self, number: int, count: int) -> list[int]:
        """Blocks that no job of the handler uses."""
        busy = {block for one in self.open[number].values() for block, _ in one.moves}
        mine = set(range(number * BLOCKS, (number + 1) * BLOCKS)) - busy
        if len(mine) < count:
            self._drain(number)
            mine |= busy
        return self.rng.sample(sorted(mine), count)

    def _store(self, number: int, pages: list[int]) -> None:
        blocks = self._free_blocks(number, len(pages))
        for layer in self.cache.tensors[0]:
            layer[blocks] = torch.randn(len(blocks), layer.shape[1]).bfloat16()
        job = self.handlers[number].store(gpu_block_ids=blocks, page_ids=pages, after=())
        stored = Submitted(job, list(zip(blocks, pages, strict=True)))
        for block, page in stored.moves:
            content = self.cache.block(block)
            self.contents[page].append(content)
            for other in (one for of in self.open for one in of.values()):
                if page in other.contents:
                    other.contents[page].append(content)
                elif other.job.direction == "store" and page in dict(other.moves).values():
                    other.is_alone = stored.is_alone = False
        self.open[number][job.id] = stored

    def _load(self, number: int, pages: list[int]) -> None:
        blocks = self._free_blocks(number, len(pages))
        job = self.handlers[number].load(
            page_ids=pages, gpu_block_ids=blocks, layer_groups=self.rng.randint(1, LAYERS), after=()
        )
        moves = list(zip(blocks, pages, strict=True))
        contents = {page: list(self.contents[page]) for page in pages}
        self.open[number][job.id] = Submitted(job, moves, contents)

    def _go_on(self) -> None:
        """Some steps of the device, or of the CPU up to the end of a layer group."""
        if self.driver is not None:
            first = self.cache.streams[0]
            for _ in range(self.rng.randrange(8)):
                self.driver.step(self.rng.randrange(first, first + 12))  # of both handlers
            return
        every = [one.job for of in self.open for one in of.values()]
        if every and self.rng.random() < 0.7:
            job = self.rng.choice(every)
            layer_group = self.rng.randrange(job.layer_group_of(LAYERS - 1) + 1)
            job.wait(layer_group=layer_group if job.direction == "load" else None)

    def _drain(self, number: int) -> None:
        if self.driver is not None:
            self.driver.set_mode("immediate")
        drain(self.handlers[number])
        if self.driver is not None:
            self.driver.set_mode("manual")
        for result in self.handlers[number].poll():
            self._judge(result, self.open[number].pop(result.job_id))

    def _judge(self, result: Result, one: Submitted) -> None:
        self.counts[f"{result.direction}, {result.state}"] += 1
        if result.direction == "store":
            assert result.ok, result
            for block, page in one.moves if one.is_alone else ():
                self.contents[page] = [self.cache.block(block)]
            return
        assert result.ok or isinstance(result.error, CorruptedPageError), result
        for place, (block, page) in enumerate(one.moves):
            if place in result.rejected:
                assert len(one.contents[page]) > 1, f"page {page} was rejected for no reason"
            elif not any(self.cache.is_same(block, content) for content in one.contents[page]):
                raise MismatchError(f"block {block} has no block that was stored in page {page}")
