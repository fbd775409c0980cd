"""The shape of a host pool: number and size of its pages."""

from __future__ import annotations

import math
import os

import numpy as np
from torch import Tensor

from torch_kvswap._native.arguments import INT64_MAX, kind_of, read_int
from torch_kvswap._native.loader import native
from torch_kvswap.encoding.slot import RAW, Encoding, VerifyName
from torch_kvswap.layout import PagedLayout, Slabs

SYSTEM_PAGE = os.sysconf("SC_PAGE_SIZE")
MAX_ALIGNMENT = 1 << 20


def read_page_alignment(page_alignment: object) -> int:
    """Checks the argument `page_alignment` of a pool.

    Raises:
        TypeError, ValueError: it is no power of two up to MAX_ALIGNMENT.
    """
    number = read_int("page_alignment", page_alignment, 1, MAX_ALIGNMENT)
    if number & (number - 1):
        raise ValueError(f"page_alignment is {number}; it must be a power of two")
    return number


class PoolShape:
    """The number and size of a pool's pages, in bytes: see HostPool.

    Attributes:
        row_bytes (int): of the digests of a slot; 0 without digests.
        table_begin (int): where the table of digests begins in the memory, after all pages.
        mapped_bytes (int): of the pages and the table.

    Raises:
        TypeError: layout is not a layout, or a number is not an integer.
        ValueError: a number is out of range, or the blocks cannot be encoded.
    """

    def __init__(
        self,
        layout: PagedLayout,
        num_pages: int,
        blocks_per_page: int,
        encoding: Encoding = RAW,
        verify: VerifyName = "off",
        page_alignment: int = 1,
    ) -> None:
        check_layout(layout)
        num_pages = read_int("num_pages", num_pages, 1)
        blocks_per_page = read_int("blocks_per_page", blocks_per_page, 1)
        self.page_alignment = read_page_alignment(page_alignment)
        # Slots stay at equal distances, so each of them is padded.
        of_slot = self.page_alignment // math.gcd(self.page_alignment, blocks_per_page)
        self.slot_bytes = -(-encoding.slot_bytes(layout) // of_slot) * of_slot
        slots = num_pages * blocks_per_page
        self.nbytes = self.table_begin = self.mapped_bytes = slots * self.slot_bytes
        self.verify = verify
        self.row_bytes = 0
        if verify != "off":
            self.row_bytes = native.digest_row_bytes(layout.sizes)
            # The table is registered by itself, and two registrations share no page of the system.
            self.table_begin = -(-self.nbytes // SYSTEM_PAGE) * SYSTEM_PAGE
            self.mapped_bytes = self.table_begin + (1 + slots) * self.row_bytes
        if self.mapped_bytes > INT64_MAX:
            raise ValueError(
                f"num_pages={num_pages} with blocks_per_page={blocks_per_page} need "
                f"{self.mapped_bytes} bytes, more than can be addressed; ask for fewer pages"
            )
        self.num_pages = num_pages
        self.blocks_per_page = blocks_per_page
        self.page_bytes = blocks_per_page * self.slot_bytes

    def chunk_of(self, nbytes: int) -> int:
        """The number of pages, a power of two, that fit in `nbytes`.

        At least as many as make whole pages of the operating system: two registrations cannot share
        one of those.
        """
        least = SYSTEM_PAGE // math.gcd(self.page_bytes, SYSTEM_PAGE)
        return max(least, 1 << max(nbytes // self.page_bytes, 1).bit_length() - 1)

    def view(self, memory: Tensor) -> Tensor:
        """The pages in the memory as uint8 [pages, blocks_per_page, bytes of a slot]."""
        return memory[: self.nbytes].view(self.num_pages, self.blocks_per_page, -1)

    def slabs(self, memory: Tensor, layout: Slabs, encoding: Encoding) -> Slabs:
        """The slabs of the pages' blocks in `memory`, for the blocks of `layout`.

        The slabs of a raw block lie in a row. Those of an encoded block have no addresses of their
        own: each has the address of the slot.
        """
        offsets = np.cumsum(layout.sizes) - layout.sizes
        return Slabs(
            bases=memory.data_ptr() + (offsets if encoding is RAW else np.zeros_like(offsets)),
            strides=np.full_like(layout.sizes, self.slot_bytes),
            sizes=layout.sizes,
            num_blocks=self.num_pages * self.blocks_per_page,
        )


def check_layout(layout: object) -> None:
    """Raises TypeError if this is not a PagedLayout."""
    if not isinstance(layout, PagedLayout):
        raise TypeError(f"a host pool is made from a PagedLayout, not {kind_of(layout)}")
