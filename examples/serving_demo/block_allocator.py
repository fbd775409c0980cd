"""A free list of blocks."""

from collections import deque
from collections.abc import Sequence


class BlockAllocator:
    """Hands out block numbers below `count`, the one that was free for longest first.

    Not thread safe. Before an owner gives a block back, all transfers of the block must have ended.

    Args:
        count (int): number of blocks.
    """

    def __init__(self, count: int) -> None:
        self.num_total = count
        self._free = deque(range(count))
        self._taken: set[int] = set()

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Takes free blocks.

        Raises:
            ValueError: fewer than `count` blocks are free; none is taken.
        """
        if not 0 <= count <= len(self._free):
            raise ValueError(f"cannot take {count} blocks: {len(self._free)} are free")
        blocks = [self._free.popleft() for _ in range(count)]
        self._taken.update(blocks)
        return blocks

    def give(self, blocks: Sequence[int]) -> None:
        """Gives blocks back.

        Raises:
            ValueError: a block is free already or named twice; none is given back.
        """
        for position, block in enumerate(blocks):
            if block not in self._taken or block in blocks[:position]:
                raise ValueError(f"block {block} at position {position} is not taken")
        self._taken.difference_update(blocks)
        self._free.extend(blocks)
