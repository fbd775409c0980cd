"""Which blocks, or host pages, are free."""

from collections import deque
from collections.abc import Sequence


class BlockAllocator:
    """Hands out the numbers below `count`, each to one owner at a time, oldest free one first.

    Not thread safe. An owner that gives a block back must have seen every transfer of it end.
    """

    def __init__(self, count: int) -> None:
        self.num_total = count
        self._free = deque(range(count))
        self._taken: set[int] = set()

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Raises ValueError, and hands out nothing, when fewer than `count` are free."""
        if not 0 <= count <= len(self._free):
            raise ValueError(f"{count} blocks were asked for, {len(self._free)} are free")
        blocks = [self._free.popleft() for _ in range(count)]
        self._taken.update(blocks)
        return blocks

    def give(self, blocks: Sequence[int]) -> None:
        """Raises ValueError, and takes nothing back, when a block has no owner or comes twice."""
        for position, block in enumerate(blocks):
            if block not in self._taken or block in blocks[:position]:
                raise ValueError(f"block {block} at position {position} is given back unowned")
        self._taken.difference_update(blocks)
        self._free.extend(blocks)
