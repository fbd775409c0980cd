"""Groups of layers, and which of their blocks a prefix needs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, SupportsIndex

from torch_kvswap._native.arguments import INT32_MAX, INT64_MAX, kind_of, read_int

MAX_PAGES = 1 << 29  # the native side numbers pages and as many ARC ghosts in 32 bits


@dataclass(frozen=True)
class BlockGroup:
    """A group of layers that share their blocks, and its number of host pages.

    Attributes:
        num_pages (int): host pages of the group.
        block_tokens (int): tokens per block, that is, per key.
        window_tokens (int | None): for sliding-window layers, the number of tokens that a token
            attends to, itself included. None is full attention.
        is_state (bool): the layers keep a state (Mamba): a block is the state after its last token,
            and only the last block is needed.
    """

    num_pages: int
    block_tokens: int = 1
    window_tokens: int | None = None
    is_state: bool = False

    @property
    def window(self) -> int:
        """Number of blocks needed before the end of a prefix; 0 is all of them."""
        if self.is_state:
            return 1
        if self.window_tokens is None:
            return 0
        # The token after the prefix is part of its own window. A window of 1 still needs one block,
        # so that a hit is backed by something that was stored.
        return max(-(-(self.window_tokens - 1) // self.block_tokens), 1)


def read_groups(groups: int | BlockGroup | Sequence[BlockGroup]) -> tuple[BlockGroup, ...]:
    """Converts the groups argument: a number of pages, a BlockGroup, or a list of them.

    Raises:
        TypeError: it is something else, or a field has a wrong type.
        ValueError: a field is out of range, the list is empty, or the groups' blocks never end at
            the same token.
    """
    if isinstance(groups, SupportsIndex):
        return (BlockGroup(read_int("groups", groups, 1, MAX_PAGES)),)
    if not isinstance(groups, BlockGroup | Sequence) or isinstance(groups, str | bytes):
        raise TypeError(
            f"groups is {kind_of(groups)}; pass a number of pages, or a list with a "
            "BlockGroup for each group of layers"
        )
    several = [groups] if isinstance(groups, BlockGroup) else groups
    if not several:
        raise ValueError("groups is empty; pass at least one BlockGroup")
    read = tuple(_read_group(index, group) for index, group in enumerate(several))
    if unit_tokens(read) > INT64_MAX:
        tokens = [group.block_tokens for group in read]
        raise ValueError(
            f"blocks of {tokens} tokens end together only every {unit_tokens(read)} tokens; "
            "give the groups block_tokens that divide each other"
        )
    return read


def _read_group(index: int, group: object) -> BlockGroup:
    """Returns the group with checked fields."""
    if not isinstance(group, BlockGroup):
        raise TypeError(f"groups[{index}] is {kind_of(group)}; pass a BlockGroup")
    limits = {"num_pages": MAX_PAGES, "block_tokens": INT32_MAX, "window_tokens": INT64_MAX}
    read: dict[str, Any] = {
        name: read_int(f"{name} of group {index}", getattr(group, name), 1, limits[name])
        for name in limits
        if name != "window_tokens" or group.window_tokens is not None
    }
    if not isinstance(group.is_state, bool):
        raise TypeError(
            f"is_state of group {index} is {kind_of(group.is_state)}; it must be True or False"
        )
    if group.is_state and group.window_tokens is not None:
        raise ValueError(f"group {index} has a state and a window; it can have one of them")
    return replace(group, **read)


def read_ready_pages(groups: Sequence[BlockGroup], ready: int | Sequence[int] | None) -> list[int]:
    """Converts the number of ready pages to a list with one entry per group; None is all pages.

    Raises:
        TypeError: it is not a number or a list of numbers.
        ValueError: a group does not have this many pages, or the list has a wrong length.
    """
    every = [group.num_pages for group in groups]
    if ready is None:
        return every
    several = [ready] if isinstance(ready, SupportsIndex) else ready
    if not isinstance(several, Sequence) or isinstance(several, str | bytes):
        raise TypeError(f"num_ready_pages is {kind_of(ready)}; pass a number for each group")
    if len(several) != len(every):
        raise ValueError(f"num_ready_pages is {ready}; the groups have {every} pages")
    return [
        read_int(f"num_ready_pages of group {index}", pages, 0, every[index])
        for index, pages in enumerate(several)
    ]


def unit_tokens(groups: Sequence[BlockGroup]) -> int:
    """Tokens per unit: the shortest prefix at whose end a block of every group ends."""
    return math.lcm(*(group.block_tokens for group in groups))


def needed_blocks(groups: Sequence[BlockGroup], units: int) -> list[range]:
    """The blocks of each group that are needed to continue after a prefix of `units` units."""
    needed = []
    for group in groups:
        end = units * (unit_tokens(groups) // group.block_tokens)
        needed.append(range(max(end - group.window, 0) if group.window else 0, end))
    return needed
