"""Groups of layers, and which of their blocks a prefix needs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, SupportsIndex

from torch_kvswap._native.arguments import (
    INT32_MAX,
    INT64_MAX,
    count_of,
    kind_of,
    read_int,
    read_switch,
)

MAX_PAGES = 1 << 29  # a table has up to four slots for each, with numbers of 32 bits


@dataclass(frozen=True)
class BlockGroup:
    """A group of layers that share their blocks, and its number of host pages.

    window_tokens and is_state exclude each other. Without both, the layers have full attention.

    Attributes:
        num_pages (int): host pages of the group.
        block_tokens (int): tokens per block, that is, per key.
        window_tokens (int | None): for sliding-window layers, the number of tokens that a token
            attends to, itself included; at least 1. None is no window.
        is_state (bool): the layers keep a state (Mamba): a block is the state after its last token,
            and only the last block is needed.

    Raises:
        TypeError: a field has a wrong type.
        ValueError: a number is out of range, or the layers have a window and a state.
    """

    num_pages: int
    block_tokens: int = 1
    window_tokens: int | None = None
    is_state: bool = False

    def __post_init__(self) -> None:
        limits = {"num_pages": MAX_PAGES, "block_tokens": INT32_MAX, "window_tokens": INT64_MAX}
        for name, most in limits.items():
            value = getattr(self, name)
            if value is not None or name != "window_tokens":
                object.__setattr__(self, name, read_int(name, value, 1, most))
        object.__setattr__(self, "is_state", read_switch("is_state", self.is_state))
        if self.is_state and self.window_tokens is not None:
            raise ValueError(
                f"window_tokens is {self.window_tokens} and is_state is True; layers have a window "
                "or a state: pass one of them"
            )

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


def read_groups(groups: int | Sequence[BlockGroup]) -> tuple[BlockGroup, ...]:
    """Converts the groups argument: a number of pages, or a list with a BlockGroup for each group.

    Raises:
        TypeError: it is something else.
        ValueError: the number is out of range, the list is empty, or the groups' blocks never end
            at the same token.
    """
    if isinstance(groups, SupportsIndex):
        return (BlockGroup(read_int("groups", groups, 1, MAX_PAGES)),)
    if not isinstance(groups, Sequence) or isinstance(groups, str | bytes):
        raise TypeError(
            f"groups is {kind_of(groups)}; pass a number of pages, or a list with a "
            "BlockGroup for each group of layers"
        )
    if not groups:
        raise ValueError("groups is empty; pass at least one BlockGroup")
    for index, group in enumerate(groups):
        if not isinstance(group, BlockGroup):
            raise TypeError(f"groups[{index}] is {kind_of(group)}; pass a BlockGroup")
    read = tuple(groups)
    if unit_tokens(read) > INT64_MAX:
        tokens = [group.block_tokens for group in read]
        raise ValueError(
            f"blocks of {tokens} tokens end together only every {unit_tokens(read)} tokens; "
            "give the groups block_tokens that divide each other"
        )
    return read


def read_layer_groups(
    groups: Sequence[BlockGroup] | None, pages: Sequence[int], is_list: bool
) -> tuple[BlockGroup, ...]:
    """Checks the groups of a cache: one for each layout. A single layout is one group.

    Args:
        pages (Sequence[int]): of the pool of each layout; 0 if a server decides.
        is_list (bool): the layouts were passed as a list.

    Raises:
        TypeError: it is something else.
        ValueError: see read_groups(); or the groups do not match the layouts.
    """
    layouts = len(pages)
    if groups is None and is_list:
        raise ValueError(
            f"groups is None, but gpu is a list of {count_of(layouts, 'layout')}; pass a "
            "BlockGroup for each"
        )
    if groups is None:
        return (BlockGroup(pages[0] or 1),)
    if not is_list:
        raise ValueError("groups is for a list of layouts; leave it out, or pass gpu as a list")
    if isinstance(groups, SupportsIndex):
        raise TypeError(
            f"groups is {kind_of(groups)}; pass a list with a BlockGroup for each layout"
        )
    read = read_groups(groups)
    if len(read) != layouts:
        raise ValueError(
            f"{count_of(len(read), 'group')} and {count_of(layouts, 'layout')}; pass a BlockGroup "
            "for each layout"
        )
    named = [group.num_pages for group in read]
    if any(pages) and named != list(pages):
        raise ValueError(
            f"the groups have {named} pages, their pools {list(pages)}; "
            "make num_pages that of the pool"
        )
    return read


def describe_contents(
    groups: Sequence[BlockGroup],
    model: str,
    rank: int,
    world: int,
    bytes_of: Mapping[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """What the pages of each group hold: `contents` of describe_page().

    Args:
        groups (Sequence[BlockGroup]): as read_layer_groups() returns them.
        model (str), rank (int), world (int): of which part of which model the pages are.
        bytes_of (Mapping[str, Any] | None): what else the key and the bytes of a block depend on.
    """
    return [
        {
            "model": model,
            "rank": rank,
            "world": world,
            "group": number,
            "groups": len(groups),
            "block_tokens": group.block_tokens,
            "window_tokens": group.window_tokens,
            "is_state": group.is_state,
            "bytes_of": dict(bytes_of or {}),
        }
        for number, group in enumerate(groups)
    ]


def read_ready_pages(groups: Sequence[BlockGroup], ready: int | Sequence[int] | None) -> list[int]:
    """Converts the number of ready pages to a list with one entry per group; see
    BlockManager.grow(). Also raises ValueError if the list has a wrong length.
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
