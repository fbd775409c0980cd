"""The format of encoded slots in plain Python, read and written value by value.

Nothing here is shared with the library. Tests let it read what the library has written, and the
other way round.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Values = npt.NDArray[np.uint16]

MAGIC = 0x4B450001
OVERFLOW = 1 << 31
TILE_BYTES = 32 << 10
# Code number i of a word of 32 bits belongs to this one of 8 values.
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class Tile:
    slab: int
    first: int  # value of the slab
    count: int  # values
    offset: int  # in the slot


class SlotModel:
    """Slots of blocks with `sizes` bytes in each slab."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = list(sizes)
        values = sum(sizes) // 2
        self.slot_bytes = int(values * 12.125 / 8) // 16 * 16
        self.metadata_bytes = offset = self.slot_bytes - values * 3 // 2
        self.tiles: list[Tile] = []
        for slab, size in enumerate(self.sizes):
            for begin in range(0, size, TILE_BYTES):
                count = min(size - begin, TILE_BYTES) // 2
                self.tiles.append(Tile(slab, begin // 2, count, offset))
                offset += count * 3 // 2
        self.places = 16 + 8 * len(self.tiles)
        self.max_escapes = (self.metadata_bytes - self.places) // 3
        self.exponents = self.places + 2 * self.max_escapes

    def entry(self, slot: Bytes, number: int) -> tuple[int, int, int]:
        """Lowest exponent, escapes and first escape of a tile."""
        lowest, zeros, escapes, first = struct.unpack_from("<BBHI", slot, 16 + 8 * number)
        assert zeros == 0
        return lowest, escapes, first

    def state(self, slot: Bytes) -> int:
        magic, state, zeros = struct.unpack_from("<IIQ", slot)
        assert (magic, zeros) == (MAGIC, 0)
        return int(state)

    def decode(self, slot: Bytes) -> list[Values]:
        """The block of a slot, slab after slab."""
        escapes = self.state(slot)
        assert escapes <= self.max_escapes
        block = [np.zeros(size // 2, np.uint16) for size in self.sizes]
        for number, tile in enumerate(self.tiles):
            lowest, count, first = self.entry(slot, number)
            assert 1 <= lowest <= 241
            assert first + count <= self.max_escapes
            signs = slot[tile.offset :][: tile.count].astype(np.uint16)
            words = slot[tile.offset + tile.count :][: tile.count // 2].view("<u4")
            codes = np.zeros((len(words), 8), np.uint16)
            for code, value in enumerate(ORDER):
                codes[:, value] = words >> (4 * code) & 15
            code_of = codes.ravel()
            exponents = np.where(code_of == 0, 0, code_of + lowest - 1)
            for escape in range(first, first + count):
                (place,) = struct.unpack_from("<H", slot, self.places + 2 * escape)
                assert code_of[place] == 0
                exponents[place] = slot[self.exponents + escape]
            values = (signs & 0x80) << 8 | exponents << 7 | signs & 0x7F
            block[tile.slab][tile.first :][: tile.count] = values
            escapes -= count
        assert escapes == 0, "the tiles have other escapes than the header says"
        return block

    def encode(self, block: Sequence[Values], lowest: int | None = None) -> Bytes:
        """A slot with the block. Escapes of later tiles come first, and what is not used is 0xEE.

        Args:
            block (sequence of arrays): its values, slab after slab.
            lowest (int | None): the lowest exponent of all tiles; None: the best one of each.
        """
        slot = np.full(self.slot_bytes, 0xEE, np.uint8)
        used = 0
        for number, tile in reversed(list(enumerate(self.tiles))):
            values = block[tile.slab][tile.first :][: tile.count]
            exponents = (values >> 7 & 0xFF).astype(np.int64)
            low = best_window(exponents) if lowest is None else lowest
            inside = (exponents >= low) & (exponents < low + 15)
            slot[tile.offset :][: tile.count] = values >> 8 & 0x80 | values & 0x7F
            codes = np.where(inside, exponents - low + 1, 0).reshape(-1, 8)
            words = np.zeros(tile.count // 8, "<u4")
            for code, value in enumerate(ORDER):
                words |= (codes[:, value] << (4 * code)).astype("<u4")
            slot[tile.offset + tile.count :][: tile.count // 2] = words.view(np.uint8)
            escapes = np.flatnonzero(~inside & (exponents != 0))
            struct.pack_into("<BBHI", slot, 16 + 8 * number, low, 0, len(escapes), used)
            for place in escapes:
                struct.pack_into("<H", slot, self.places + 2 * used, place)
                slot[self.exponents + used] = exponents[place]
                used += 1
        assert used <= self.max_escapes
        struct.pack_into("<IIQ", slot, 0, MAGIC, used, 0)
        return slot


def best_window(exponents: npt.NDArray[np.int64]) -> int:
    """The lowest of 15 exponents that most of these are among."""
    counts = np.bincount(exponents, minlength=256)
    return 1 + int(np.argmax([counts[low : low + 15].sum() for low in range(1, 242)]))
