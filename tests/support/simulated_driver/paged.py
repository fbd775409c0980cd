"""Paged caches and host pools in memory that the simulated driver takes for a GPU's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from simulated_driver.driver import DEVICE, HOST, Driver

if TYPE_CHECKING:  # the package looks for a driver when it is loaded: the simulated one comes first
    from torch_kvswap.host_pool.pool import HostPool
    from torch_kvswap.layout import PagedLayout


def place(driver: Driver, layout: PagedLayout, device: int = 0) -> PagedLayout:
    """Makes the driver take a layout of CPU tensors for one on a GPU."""
    for tensor in layout.tensors:
        storage = tensor.untyped_storage()
        driver.adopt(torch.empty(0, dtype=torch.uint8).set_(storage), DEVICE, device)
    layout.device = torch.device("cuda", device)
    return layout


def on_device(
    driver: Driver, whole: torch.Tensor, tensors: Sequence[torch.Tensor] | None = None
) -> PagedLayout:
    """A layout of the rows of `whole`, or of parts of it, which is one allocation on GPU 0."""
    from torch_kvswap.layout import PagedLayout

    driver.adopt(whole.view(-1), DEVICE)
    layout = PagedLayout(list(whole) if tensors is None else tensors)
    layout.device = torch.device("cuda", 0)
    return layout


def pool(driver: Driver, layout: PagedLayout, num_pages: int, blocks_per_page: int = 1) -> HostPool:
    """A host pool for a layout from `place`, in memory that the driver takes for pinned."""
    from host_pools import unpinned

    made = unpinned(layout, num_pages, blocks_per_page)
    driver.adopt(made.pages, HOST)
    return made


def cache(
    driver: Driver,
    num_blocks: int = 16,
    num_pages: int = 16,
    layers: int = 2,
    block_bytes: int = 64,
) -> tuple[PagedLayout, HostPool]:
    """A cache with random bytes on GPU 0, and a host pool for it."""
    from torch_kvswap.layout import PagedLayout

    tensors = [
        torch.randint(256, (num_blocks, block_bytes), dtype=torch.uint8) for _ in range(layers)
    ]
    layout = place(driver, PagedLayout(tensors))
    return layout, pool(driver, layout, num_pages)
