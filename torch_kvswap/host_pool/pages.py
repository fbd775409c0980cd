"""What the pages of a host pool are, and which of them a process uses."""

from __future__ import annotations

import math
import os

import numpy as np
from torch import Tensor

from torch_kvswap._native.arguments import INT64_MAX, read_int
from torch_kvswap.layout import Slabs

SYSTEM_PAGE = os.sysconf("SC_PAGE_SIZE")


class Pages:
    """`count` pages of `size` bytes, `nbytes` together, each of blocks_per_page blocks. A process
    uses `local`: its share by rank, or all if replicated.

    Raises:
        ValueError: the numbers are impossible.
    """

    def __init__(
        self,
        layout: Slabs,
        count: int,
        blocks_per_page: int,
        rank: int = 0,
        world: int = 1,
        replicated: bool = False,
    ) -> None:
        if not isinstance(layout, Slabs):
            raise TypeError(f"a host pool is made from a PagedLayout, not {type(layout).__name__}")
        count = read_int("num_pages", count, 1)
        blocks_per_page = read_int("blocks_per_page", blocks_per_page, 1)
        world = read_int("world", world, 1)
        rank = read_int("rank", rank, 0, world - 1)
        if (nbytes := count * blocks_per_page * layout.block_bytes) > INT64_MAX:
            raise ValueError(
                f"num_pages={count} with blocks_per_page={blocks_per_page} need {nbytes} bytes, "
                "more than can be addressed; ask for fewer pages"
            )
        if count < world and not replicated:
            raise ValueError(
                f"num_pages={count} for world={world}: each process needs a page at least"
            )
        self.count = count
        self.blocks_per_page = blocks_per_page
        self.size = blocks_per_page * layout.block_bytes
        self.nbytes = nbytes
        self.world, self.replicated = world, bool(replicated)
        part = rank * count // world, (rank + 1) * count // world
        self.local = range(count) if replicated else range(*part)
        self.local_bytes = range(self.local.start * self.size, self.local.stop * self.size)

    def chunk_of(self, nbytes: int) -> int:
        """Pages in a chunk of this many bytes at most, always a power of two. Chunks end between
        pages of the system, none of which two registrations may have in part."""
        least = SYSTEM_PAGE // math.gcd(self.size, SYSTEM_PAGE)
        return max(least, 1 << max(nbytes // self.size, 1).bit_length() - 1)

    def view(self, memory: Tensor) -> Tensor:
        """uint8 [pages, blocks in a page, bytes of a block]"""
        return memory.view(self.count, self.blocks_per_page, -1)

    def slabs(self, memory: Tensor, layout: Slabs, slot_bytes: int | None = None) -> Slabs:
        """A block on the host is its slabs one after another. slot_bytes: from one block to the
        next, where that is more than a block has."""
        return Slabs(
            bases=memory.data_ptr() + np.cumsum(layout.sizes) - layout.sizes,
            strides=np.full_like(layout.sizes, slot_bytes or layout.block_bytes),
            sizes=layout.sizes,
            num_blocks=self.count * self.blocks_per_page,
        )
