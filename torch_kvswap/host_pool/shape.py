"""The shape of a host pool: number and size of its pages."""

from __future__ import annotations

import math
import os
from typing import NamedTuple

import numpy as np
from torch import Tensor

from torch_kvswap._native.arguments import INT64_MAX, kind_of, read_int
from torch_kvswap._native.loader import native
from torch_kvswap.encoding.slot import RAW, SLOT_ALIGNMENT, Encoding, VerifyName
from torch_kvswap.layout import PagedLayout, Slabs

SYSTEM_PAGE = os.sysconf("SC_PAGE_SIZE")
EXCHANGE_BYTES: int = native.EXCHANGE_BYTES
_ROW_ALIGNMENT = 64  # bytes, of a slot's checksums


def read_part(part: object, name: str = "part") -> tuple[int, int] | None:
    """Checks the argument `part` of a pool, or another one of this kind.

    Raises:
        TypeError, ValueError: it is no pair of a rank and a number of ranks.
    """
    if part is None:
        return None
    if not isinstance(part, tuple) or len(part) != 2:
        given = repr(part) if isinstance(part, tuple) else kind_of(part)
        raise TypeError(f"{name} is {given}; pass a tuple, (rank, number of ranks)")
    world = read_int(f"{name}[1]", part[1], 1)
    return read_int(f"{name}[0]", part[0], 0, world - 1), world


class Part(NamedTuple):
    """What a slot has of one rank.

    Attributes:
        nbytes (int): of all; each part begins where an encoded block can.
        checksums_begin (int): where the checksums begin, behind the block.
        row_bytes (int): of the checksums; 0 without checksums.
    """

    nbytes: int
    checksums_begin: int
    row_bytes: int

    @classmethod
    def of(cls, nbytes: int, row_bytes: int) -> Part:
        """Of a block of `nbytes` with checksums of `row_bytes`."""
        begin = _rounded(nbytes, _ROW_ALIGNMENT if row_bytes else SLOT_ALIGNMENT)
        return cls(begin + row_bytes, begin, row_bytes)

    def table(
        self, first_slot: int, slot_bytes: int, counter: int = 0, group: int = 0
    ) -> native.ChecksumTable:
        """The checksums of this part of all slots, the first of which has this address."""
        rows = first_slot + self.checksums_begin
        return native.ChecksumTable(counter, rows, slot_bytes, self.row_bytes, group)


def _rounded(nbytes: int, alignment: int) -> int:
    return -(-nbytes // alignment) * alignment


class PoolShape:
    """The number and size of a pool's pages, in bytes: see HostPool.

    Attributes:
        parts (int): ranks that have a part of each slot; 0 without `part`.
        part_begin (int): where the part of this process begins in a slot.
        part_bytes (int): of a part; of the whole slot if it has one part.
        block_room (int): bytes of a part that a block can have.
        page_room (int): bytes of a page that are the pool's. More follow before the next page only
            in memory of somebody else.
        row_bytes (int): of the checksums of a slot; 0 without checksums.
        table_begin (int): where the number of the latest store lies, counted from the first page:
            after all pages, or in memory of its own. Behind it lie the checksums, unless slots have
            parts: those have their own.
        table_bytes (int): of the number and the checksums behind it; 0 without checksums.

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
        part: tuple[int, int] | None = None,
        page_bytes: int | None = None,
        lead: int = 0,
    ) -> None:
        """page_bytes: from page to page in memory of somebody else, where the first page begins
        `lead` bytes behind a page of the operating system.
        """
        check_layout(layout)
        num_pages = read_int("num_pages", num_pages, 1)
        blocks_per_page = read_int("blocks_per_page", blocks_per_page, 1)
        self.verify = verify
        rank, self.parts = part or (0, 0)
        self.row_bytes = 0 if verify == "off" else native.checksum_row_bytes(layout.sizes)
        nbytes = encoding.slot_bytes(layout)
        self._part = Part.of(nbytes, self.row_bytes) if self.parts else None
        if self._part is not None:
            nbytes = self._part.nbytes
        self.slot_bytes = max(self.parts, 1) * nbytes
        if page_bytes is not None:
            self.slot_bytes = page_bytes // blocks_per_page
        is_whole = self.parts <= 1 and page_bytes is None
        self.part_bytes = self.slot_bytes if is_whole else nbytes
        self.part_begin = rank * self.part_bytes
        self.block_room = self.part_bytes
        slots = rows = num_pages * blocks_per_page
        self.nbytes = self.table_begin = slots * self.slot_bytes
        self.table_bytes = 0
        if self.row_bytes:
            if self._part is not None:
                self.block_room, rows = self._part.checksums_begin, 0
            # The table is registered by itself, and two registrations share no page of the system.
            self.table_begin = _rounded(self.nbytes, SYSTEM_PAGE)
            self.table_bytes = (1 + rows) * self.row_bytes
        if self.mapped_bytes > INT64_MAX:
            raise ValueError(
                f"num_pages={num_pages} with blocks_per_page={blocks_per_page} need "
                f"{self.mapped_bytes} bytes, more than can be addressed; ask for fewer pages"
            )
        self.num_pages = num_pages
        self.blocks_per_page = blocks_per_page
        self.page_bytes = self.page_room = blocks_per_page * self.slot_bytes
        if page_bytes is not None:
            self.page_room -= self.slot_bytes - self.part_bytes
        self._lead = lead

    @property
    def mapped_bytes(self) -> int:
        """Of the pages and the table behind them."""
        return self.table_begin + self.table_bytes

    @property
    def file_bytes(self) -> int:
        """Of a shared pool's file. It ends with EXCHANGE_BYTES for ranks that exchange loads, which
        the pool does not pin."""
        return _rounded(self.mapped_bytes, SYSTEM_PAGE) + EXCHANGE_BYTES

    def chunk_of(self, nbytes: int) -> int:
        """The number of pages, a power of two, that fit in `nbytes`.

        At least as many as make whole pages of the operating system: two registrations cannot share
        one of those. All, if no such page begins between two pages.
        """
        least = SYSTEM_PAGE // math.gcd(self.page_bytes, SYSTEM_PAGE)
        if self._lead > self.page_bytes - self.page_room:
            least = 1 << (self.num_pages - 1).bit_length()
        return max(least, 1 << max(nbytes // self.page_bytes, 1).bit_length() - 1)

    def bytes_of(self, begin: int, end: int) -> tuple[int, int]:
        """Where a chunk with the pages from `begin` to `end` begins and ends."""
        return self._end_of(begin), self._end_of(end)

    def _end_of(self, page: int) -> int:
        """Where a chunk ends that has the pages before this one."""
        if page == self.num_pages:
            return self.nbytes - self.page_bytes + self.page_room
        return page * self.page_bytes - self._lead

    def view(self, memory: Tensor) -> Tensor:
        """The pages in the memory as uint8 [pages, blocks_per_page, bytes of a part]."""
        counts = self.num_pages, self.blocks_per_page, self.part_bytes
        first = memory.storage_offset() + self.part_begin
        return memory.as_strided(counts, (self.page_bytes, self.slot_bytes, 1), first)

    def checksums(self, memory: int, group: int, rank: int | None = None) -> native.ChecksumTable:
        """The checksums of all slots in the memory that begins at this address, for blocks of one
        group; of another rank's part of them, if it is given."""
        counter = memory + self.table_begin
        if self._part is not None:
            begin = self.part_begin if rank is None else rank * self.part_bytes
            return self._part.table(memory + begin, self.slot_bytes, counter, group)
        rows = counter + self.row_bytes
        return native.ChecksumTable(counter, rows, self.row_bytes, self.row_bytes, group)

    def slabs(self, memory: Tensor, layout: Slabs, encoding: Encoding) -> Slabs:
        """The slabs of the pages' blocks in `memory`, for the blocks of `layout`.

        The slabs of a raw block lie in a row. Those of an encoded block have no addresses of their
        own: each has the address of the slot.
        """
        offsets = np.cumsum(layout.sizes) - layout.sizes
        first = memory.data_ptr() + self.part_begin
        return Slabs(
            bases=first + (offsets if encoding is RAW else np.zeros_like(offsets)),
            strides=np.full_like(layout.sizes, self.slot_bytes),
            sizes=layout.sizes,
            num_blocks=self.num_pages * self.blocks_per_page,
        )


def check_layout(layout: object, name: str = "layout") -> None:
    """Raises TypeError that names the argument if this is not a PagedLayout."""
    if not isinstance(layout, PagedLayout):
        raise TypeError(f"{name} is {kind_of(layout)}; pass a PagedLayout of the cache's tensors")
