"""The groups of layers of a model, and which blocks of each a prefix needs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

MOST_PAGES = 1 << 29  # the native side numbers them, and as many ghosts, with 32 bits


@dataclass(frozen=True)
class BlockGroup:
    """Layers that share their blocks, and how many host pages they have.

    block_tokens: tokens of a block. window_tokens: of sliding-window layers, how many tokens a
    token sees, itself among them; None: all. is_state: of layers whose block is the state behind
    its last token (Mamba), so that only that of the last block is needed.
    """

    num_pages: int
    block_tokens: int = 1
    window_tokens: int | None = None
    is_state: bool = False

    @property
    def window(self) -> int:
        """How many blocks before the end of a prefix are needed to go on; 0: all."""
        if self.is_state:
            return 1
        if self.window_tokens is None:
            return 0
        # The token behind the prefix sees itself; a window of 1 still takes one block, so that a
        # hit is something that was stored.
        return max(-(-(self.window_tokens - 1) // self.block_tokens), 1)


def read_groups(groups: int | BlockGroup | Sequence[BlockGroup]) -> tuple[BlockGroup, ...]:
    """Raises ValueError for what no group can have."""
    if isinstance(groups, int):
        groups = BlockGroup(groups)
    several = (groups,) if isinstance(groups, BlockGroup) else tuple(groups)
    if not several:
        raise ValueError("there are no groups; name one at least")
    for index, group in enumerate(several):
        for name in ("num_pages", "block_tokens", "window_tokens"):
            value = getattr(group, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} of group {index} is {value}; it is 1 at least")
        if group.num_pages > MOST_PAGES:
            raise ValueError(
                f"num_pages of group {index} is {group.num_pages}; it is {MOST_PAGES} at most"
            )
        if group.is_state and group.window_tokens is not None:
            raise ValueError(f"group {index} has a state and a window; it can have one of them")
    return several


def read_ready_pages(groups: Sequence[BlockGroup], ready: int | Sequence[int] | None) -> list[int]:
    """Of each group; None: all. Raises ValueError for more pages than there are."""
    every = [group.num_pages for group in groups]
    several = every if ready is None else [ready] if isinstance(ready, int) else list(ready)
    if len(several) != len(every) or not all(0 <= n <= every[g] for g, n in enumerate(several)):
        raise ValueError(f"ready_pages is {ready}; the groups have {every} pages")
    return several


def unit_tokens(groups: Sequence[BlockGroup]) -> int:
    """Tokens of the shortest prefix at the end of which all groups end a block."""
    return math.lcm(*(group.block_tokens for group in groups))


def needed_blocks(groups: Sequence[BlockGroup], units: int) -> list[range]:
    """For each group, which blocks of a request are needed to go on behind so many units."""
    needed = []
    for group in groups:
        end = units * (unit_tokens(groups) // group.block_tokens)
        needed.append(range(max(end - group.window, 0) if group.window else 0, end))
    return needed
