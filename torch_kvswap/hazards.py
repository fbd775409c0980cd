"""Which transfer another one must wait for, because both touch a block or a page."""

from __future__ import annotations

import numpy as np

from torch_kvswap.layout import Int64Array
from torch_kvswap.transfer import Direction

_OTHER: dict[Direction, Direction] = {"store": "load", "load": "store"}


class Hazards:
    """The latest store and the latest load of each block of a cache and each page of a pool.

    A store reads blocks and writes pages, a load reads pages and writes blocks: two of them that
    share a block or a page must not overlap in time. Transfers of one direction run in the order of
    their numbers, so that waiting for the latest is waiting for all. One number per block and page
    and direction is kept, and what a look-up costs does not grow with the jobs outstanding.

    Not thread safe: the owner has a lock.
    """

    def __init__(self, num_blocks: int, num_pages: int) -> None:
        self._latest = {
            direction: (np.full(num_blocks, -1, np.int64), np.full(num_pages, -1, np.int64))
            for direction in _OTHER
        }

    def latest_before(self, direction: Direction, blocks: Int64Array, pages: Int64Array) -> int:
        """The number of the latest transfer of the other direction that shares a block or a page
        with one of this direction; -1 when there is none."""
        of_blocks, of_pages = self._latest[_OTHER[direction]]
        return int(max(of_blocks[blocks].max(initial=-1), of_pages[pages].max(initial=-1)))

    def note(
        self, direction: Direction, number: int, blocks: Int64Array, pages: Int64Array
    ) -> None:
        """A transfer was submitted. Numbers grow within a direction."""
        of_blocks, of_pages = self._latest[direction]
        of_blocks[blocks] = number
        of_pages[pages] = number
