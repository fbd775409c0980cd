"""The groups of layers of a model, and which blocks of each a prefix needs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, SupportsIndex

from torch_kvswap._native.arguments import INT32_MAX, INT64_MAX, read_int

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
    """The groups that a caller names, by a number of pages or one by one.

    Raises:
        TypeError: it is neither, or a field has a wrong type.
        ValueError: no group can have such a field, or there are no groups.
    """
    if isinstance(groups, SupportsIndex):
        return (BlockGroup(read_int("groups", groups, 1, MOST_PAGES)),)
    if not isinstance(groups, BlockGroup | Sequence) or isinstance(groups, str | bytes):
        raise TypeError(
            f"groups is a {type(groups).__name__}; pass a number of pages, or a list with a "
            "BlockGroup for each group of layers"
        )
    several = [groups] if isinstance(groups, BlockGroup) else groups
    if not several:
        raise ValueError("there are no groups; name one at least")
    read = tuple(_read_group(index, group) for index, group in enumerate(several))
    if unit_tokens(read) > INT64_MAX:
        tokens = [group.block_tokens for group in read]
        raise ValueError(
            f"blocks of {tokens} tokens end together only every {unit_tokens(read)} tokens; "
            "give the groups block_tokens that divide each other"
        )
    return read


def _read_group(index: int, group: object) -> BlockGroup:
    if not isinstance(group, BlockGroup):
        raise TypeError(f"groups[{index}] is a {type(group).__name__}; pass a BlockGroup")
    most = {"num_pages": MOST_PAGES, "block_tokens": INT32_MAX, "window_tokens": INT64_MAX}
    read: dict[str, Any] = {
        name: read_int(f"{name} of group {index}", getattr(group, name), 1, most[name])
        for name in most
        if name != "window_tokens" or group.window_tokens is not None
    }
    if not isinstance(group.is_state, bool):
        kind = type(group.is_state).__name__
        raise TypeError(f"is_state of group {index} is a {kind}; it must be True or False")
    if group.is_state and group.window_tokens is not None:
        raise ValueError(f"group {index} has a state and a window; it can have one of them")
    return replace(group, **read)


def read_ready_pages(groups: Sequence[BlockGroup], ready: int | Sequence[int] | None) -> list[int]:
    """Of each group; None: all. Raises TypeError for no numbers, ValueError for more pages than
    there are."""
    every = [group.num_pages for group in groups]
    if ready is None:
        return every
    several = [ready] if isinstance(ready, SupportsIndex) else ready
    if not isinstance(several, Sequence) or isinstance(several, str | bytes):
        raise TypeError(
            f"num_ready_pages is a {type(ready).__name__}; pass a number for each group"
        )
    if len(several) != len(every):
        raise ValueError(f"num_ready_pages is {ready}; the groups have {every} pages")
    return [
        read_int(f"num_ready_pages of group {index}", pages, 0, every[index])
        for index, pages in enumerate(several)
    ]


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
