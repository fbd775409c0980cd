"""The checksums of blocks in plain Python: NH of tiles, bound to a slot and a store."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

MASK = (1 << 64) - 1
TILE, UNIT = 8192, 1024


def mix(x: int) -> int:
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & MASK
    return x ^ x >> 31


def tag_of(slot: int, store: int) -> int:
    return mix(mix(slot + 1) + store & MASK)


KEYS = np.array(
    [mix((i + 1) * 0x9E3779B97F4A7C15 & MASK) >> 32 for i in range((TILE + UNIT) // 4)], np.uint32
)


def checksum_of(tile: bytes, number: int) -> int:
    """Of the tile with this number in its block."""
    words = np.frombuffer(tile.ljust(-(-len(tile) // UNIT) * UNIT, b"\0"), np.uint32)
    sums = []
    for shift in (0, UNIT // 4):
        keyed = (words + KEYS[shift : shift + len(words)]).reshape(-1, 2, UNIT // 8)
        products = keyed[:, 0].astype(np.uint64) * keyed[:, 1].astype(np.uint64)
        sums.append(int(products.sum(dtype=np.uint64)))
    return mix(mix(sums[0] + number & MASK) + sums[1] & MASK)


def checksums_of(slabs: Sequence[bytes]) -> list[int]:
    """Of the tiles of a block."""
    tiles = [slab[at : at + TILE] for slab in slabs for at in range(0, len(slab), TILE)]
    return [checksum_of(tile, number) for number, tile in enumerate(tiles)]
