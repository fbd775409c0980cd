"""A bf16 cache and a host pool of encoded pages, on the CPU, a GPU or the simulated driver."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from simulated_cache import run_until
from torch import Tensor

from torch_kvswap.host_pool.pool import HostPool
from torch_kvswap.layout import PagedLayout
from torch_kvswap.offload.handler import Job, OffloadHandler
from torch_kvswap.results import Result

if TYPE_CHECKING:
    from simulated_driver import Driver

VALUES = 2048  # of a block in a layer: less would leave no room for escapes
STAGING_BYTES = 1 << 20
METHODS = ("staged", "kernel")  # of the simulated driver and of a GPU


class EncodedCache:
    """Blocks of normal numbers, which fit into their slots, in `layers` layers.

    Args:
        driver: whose GPU has the cache, in manual mode afterwards; None is `device`.
        device: of the cache.
        layers: of each group, or a list with one number per group.
        encodings: of the groups, one after another. A single one gives a handler without lists.
        views: maps a group to an earlier one, of whose pool it has a view. The others have pools
            of their own.
        verify: of the pools.
        rows: whether the checksums are in the slots, as in pages for vLLM's tiers.
        values: of a block in each layer, or in each layer of each group.
        options: of the handler.

    Attributes:
        streams (range): the handler's streams, in the order in which it creates them: those of
            copies are the first one of stores, the third one of loads.
    """

    def __init__(
        self,
        driver: Driver | None = None,
        *,
        device: str = "cpu",
        blocks: int = 16,
        pages: int = 16,
        per_page: int = 1,
        layers: int | Sequence[int] = 3,
        values: int = VALUES,
        encodings: Sequence[str] = ("lossless",),
        views: Mapping[int, int] | None = None,
        verify: str = "off",
        rows: bool = False,
        **options: Any,
    ) -> None:
        torch.set_num_threads(1)
        random = np.random.default_rng(7)
        self.driver = driver
        self.tensors: list[list[Tensor]] = []
        self.layouts: list[PagedLayout] = []
        self.pools: list[HostPool] = []
        views = views or {}
        for group, encoding in enumerate(encodings):
            count = layers if isinstance(layers, int) else layers[group]
            numbers = random.standard_normal((count, blocks, values), np.float32)
            tensors = list(torch.from_numpy(numbers).bfloat16().to(device))
            layout = PagedLayout(tensors)
            if driver is not None:
                from simulated_driver import place

                place(driver, layout)
            of_pool: dict[str, Any] = {"encoding": encoding}
            self.tensors.append(tensors)
            self.layouts.append(layout)
            if group in views:
                pool = self.pools[views[group]].view_for(layout, **of_pool)
            else:
                if rows:
                    of_pool |= {"shared": True, "part": (0, 1)}
                pool = HostPool(layout, pages, per_page, verify=verify, **of_pool)
            self.pools.append(pool)
        if driver is not None:
            options.setdefault("staging_bytes", STAGING_BYTES)
            first = driver.cuda.create_stream() + 1  # streams are counted
            self.streams = range(first, first + 6)
        several = len(encodings) > 1
        self.handler = OffloadHandler(
            self.layouts if several else self.layouts[0],
            self.pools if several else self.pools[0],
            **{"copy_method": "auto", **options},
        )
        if driver is not None:
            driver.set_mode("manual")
            driver.log()

    def store(self, blocks: Any, pages: Any, **options: Any) -> Job:
        options.setdefault("after", ())
        return self.handler.store(gpu_block_ids=blocks, page_ids=pages, **options)

    def load(self, pages: Any, blocks: Any, **options: Any) -> Job:
        options.setdefault("after", ())
        return self.handler.load(page_ids=pages, gpu_block_ids=blocks, **options)

    def block(self, block: int, group: int = 0) -> Tensor:
        """The bits of a block, layer after layer."""
        return torch.cat([layer[block].view(torch.int16) for layer in self.tensors[group]]).cpu()

    def is_same(self, block: int, bits: Tensor, group: int = 0) -> bool:
        return torch.equal(self.block(block, group), bits)

    def spoil(self, *blocks: int, group: int = 0) -> None:
        """Gives blocks contents that fit into no encoded slot."""
        random = np.random.default_rng(5)
        for block in blocks:
            for layer in self.tensors[group]:
                bits = random.integers(-(1 << 15), 1 << 15, layer.shape[1], np.int16)
                layer[block] = torch.from_numpy(bits).view(torch.bfloat16)

    def clear(self, *blocks: int, group: int = 0) -> None:
        for layer in self.tensors[group]:
            layer[list(blocks)] = 0

    def synchronize(self) -> None:
        """Waits for what the caller has given to its streams."""
        if self.tensors[0][0].is_cuda:
            torch.cuda.synchronize()

    def __enter__(self) -> EncodedCache:
        return self

    def __exit__(self, failure: object, *_: object) -> None:
        if self.driver is not None:
            self.driver.set_mode("immediate")
        if failure is None:
            self.handler.close()


def finish(cache: EncodedCache, *jobs: Job) -> list[Result]:
    """Runs the device until the jobs have ended, and returns their results."""
    assert cache.driver is not None
    run_until(cache.driver, lambda: all([job.query() for job in jobs]))
    return [job.result for job in jobs if job.result is not None]
