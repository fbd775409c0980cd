"""Handlers of several ranks that exchange loads, each on a GPU of the simulated driver."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from typing import Any

import pytest
import torch
from patience import PATIENCE, in_time
from simulated_driver import Driver, place
from staged_bytes import numbers
from torch import Tensor

from torch_kvswap import HostPool, PagedLayout
from torch_kvswap.offload import exchange as exchange_module
from torch_kvswap.offload.handler import Job, OffloadHandler

LAYERS, BLOCKS, FRAGMENT = 2, 40, 1 << 15
STAGING = 1 << 20  # loads of 64 KiB or more are exchanged; a place in a ring has as much
LARGE = list(range(4, 36))


def at_once(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Calls each in a thread of its own; returns what they return."""
    found: dict[int, Any] = {}

    def call(number: int) -> None:
        found[number] = calls[number]()

    threads = [threading.Thread(target=call, args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[number] for number in range(len(calls))]


class Ranks:
    """Caches with random bytes, one on each GPU, and a pool whose pages all of them load.

    A load changes what is expected. own: options of each rank. wholes: the memory of the caches,
    [layers, blocks, ...]. pool: options of the pool. is_hybrid: a second group, whose layers come behind
    the others, takes no part in loads.
    """

    def __init__(
        self,
        driver: Driver,
        ranks: int = 2,
        *,
        deadline: float = PATIENCE,
        join_timeout: float = PATIENCE,
        fragment: int = FRAGMENT,
        own: Sequence[Mapping[str, Any]] = (),
        wholes: Sequence[Tensor] = (),
        pool: Mapping[str, Any] | None = None,
        is_hybrid: bool = False,
        **options: Any,
    ) -> None:
        self.driver = driver
        self.wholes = wholes or [numbers(LAYERS, BLOCKS, fragment) for _ in range(ranks)]
        self.layouts = [
            place(driver, PagedLayout(list(whole)), rank) for rank, whole in enumerate(self.wholes)
        ]
        self.pool = HostPool(
            self.layouts[0], num_pages=BLOCKS + 2 * ranks, shared=True, **(pool or {})
        )
        if not pool:
            self.pages = self.pool.pages.view(self.pool.num_pages, LAYERS, -1)
            self.pages.copy_(numbers(*self.pages.shape))
            self.expected = [self.blocks(rank) for rank in range(ranks)]
        self.more: list[PagedLayout] = []
        if is_hybrid:
            self.more = [
                place(driver, PagedLayout([numbers(1, 4096) for _ in range(LAYERS)]), rank)
                for rank in range(ranks)
            ]
            self.other_pool = HostPool(self.more[0], num_pages=1, shared=True)
        # A pool of its own for each rank, on the same memory.
        with closing(self.pool.share()) as handle:
            others = [HostPool.attach(layout, handle) for layout in self.layouts[1:]]
        self.pools = [self.pool, *others]
        self.options = {"copy_method": "staged", "staging_bytes": STAGING, **options}
        self.own = own or [{}] * ranks
        self.handlers: list[OffloadHandler] = []
        self.open(deadline, join_timeout)

    def open(self, deadline: float = PATIENCE, join_timeout: float = PATIENCE) -> None:
        """Makes the handlers. exchange=None in its own options leaves a rank out."""
        ranks = len(self.layouts)

        def handler(rank: int) -> OffloadHandler:
            options = {"exchange": (rank, ranks), **self.options, **self.own[rank]}
            if self.more:
                layouts = [self.layouts[rank], self.more[rank]]
                return OffloadHandler(layouts, [self.pools[rank], self.other_pool], **options)
            return OffloadHandler(self.layouts[rank], self.pools[rank], **options)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(exchange_module, "DEADLINE", deadline)
            patch.setattr(exchange_module, "JOIN_TIMEOUT", join_timeout)
            self.handlers = at_once([lambda rank=rank: handler(rank) for rank in range(ranks)])
        self.driver.set_mode("manual")

    def blocks(self, rank: int) -> Tensor:
        """[blocks, layers, ...]"""
        return self.wholes[rank].transpose(0, 1).contiguous()

    def own_pages(self, rank: int) -> list[int]:
        """Pages that no other rank uses."""
        return [BLOCKS + 2 * rank, BLOCKS + 2 * rank + 1]

    def load(self, rank: int, pages: Sequence[int], blocks: Sequence[int], **options: Any) -> Job:
        if hasattr(self, "expected"):
            self.expected[rank][list(blocks)] = self.pages[list(pages)]
        ids = {"page_ids": pages, "gpu_block_ids": blocks}
        if self.more:
            ids = {name: [of_first, []] for name, of_first in ids.items()}
        return self.handlers[rank].load(**ids, **{"after": (), **options})

    def load_all(self, pages: Sequence[int], blocks: Sequence[int], **options: Any) -> list[Job]:
        return [self.load(rank, pages, blocks, **options) for rank in range(len(self.handlers))]

    def finish(self, *jobs: Job) -> None:
        for job in jobs:
            assert in_time(lambda job=job: self.driver.run() >= 0 and job.query()), (
                self.driver.pending()
            )

    def is_right(self, *ranks: int) -> bool:
        chosen = ranks or range(len(self.handlers))
        return all(torch.equal(self.blocks(rank), self.expected[rank]) for rank in chosen)

    @property
    def exchanged(self) -> list[int]:
        """Bytes that each rank got from the others."""
        return [handler.metrics().loads.exchanged_bytes for handler in self.handlers]

    def close(self) -> None:
        self.driver.set_mode("immediate")
        with ExitStack() as stack:
            for handler in self.handlers:
                stack.callback(handler.close)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, failure: object, *_: object) -> None:
        if failure is None:
            self.close()
            for pool in reversed(self.pools):
                pool.close()
