"""Reads the arguments of a prefix cache's calls, each once.

Behind it keys, in a row, and GPU blocks are lists with an item for each group of layers.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from torch_kvswap._native.arguments import Int64Array, count_of, kind_of
from torch_kvswap._native.ids import split_groups
from torch_kvswap._native.loader import native
from torch_kvswap.host_pool.pool import HostPool
from torch_kvswap.layout import PagedLayout
from torch_kvswap.prefix.block_groups import BlockGroup
from torch_kvswap.prefix.hashing import KEY_BYTES, PrefixKeys
from torch_kvswap.prefix.manager import needed_blocks


class Prompt(NamedTuple):
    """The blocks that a job is to move, of each group.

    Attributes:
        keys (list[bytes]): of these blocks.
        blocks (list[array]): the GPU blocks of these keys.
        named (list[array]): all blocks that the caller has named; some may be -1.
    """

    keys: list[bytes]
    blocks: list[array[int]]
    named: list[array[int]]


class ArgumentReader:
    """Reads keys and GPU blocks.

    Args:
        pools (Sequence[HostPool]): one for each group.
        groups (Sequence[BlockGroup]): of the pools.
        is_list (bool): the caller passes a list with an item for each group. A caller that does not
            has one group, whose block_tokens the first keys decide.
    """

    def __init__(
        self, pools: Sequence[HostPool], groups: Sequence[BlockGroup], is_list: bool
    ) -> None:
        self._per_page = [pool.blocks_per_page for pool in pools]
        self._groups, self._is_list = groups, is_list
        self._tokens = [group.block_tokens if is_list else None for group in groups]

    def read_keys(self, keys: Any) -> list[bytes]:
        """The keys of each group. Raises TypeError for tokens, or for the keys of one group where
        there are several, and ValueError if keys are of other block_tokens than their group, which
        only the keys of a PrefixHasher say.
        """
        first = keys[0] if self._is_list and isinstance(keys, Sequence) and keys else None
        if isinstance(first, bytes | tuple):
            # It could be read as the keys of a group: as keys in a row, or as a sequence of keys.
            raise TypeError(
                f"keys[0] is {kind_of(first)}, which is one key; pass a list of "
                f"{len(self._groups)} lists, the keys of each group"
            )
        read = []
        for group, of_group in enumerate(self._split("keys", keys)):
            first = of_group[0] if isinstance(of_group, Sequence) and of_group else None
            if type(first) is int and not isinstance(of_group, bytes):
                raise TypeError(
                    f"{self._name('keys', group)}[0] is an int, as tokens are; pass keys "
                    "of a PrefixHasher, such as hasher.lookup_keys(tokens), or make keys of your "
                    f"own tuples, such as ({first},)"
                )
            if isinstance(first, list | PrefixKeys) and not self._is_list:
                raise TypeError(
                    f"keys[0] is {kind_of(first)}, but this cache was made of one layout, not of a "
                    "list; pass keys[0] itself"
                )
            if isinstance(of_group, PrefixKeys):
                self._check_tokens(group, of_group.block_tokens)
                read.append(of_group.joined)
            else:
                read.append(native.join_keys(self._name("keys", group), of_group))
        return read

    def _check_tokens(self, group: int, tokens: int) -> None:
        """Raises ValueError if the group's keys stand for another number of tokens."""
        own = self._tokens[group]
        if own is None:
            self._tokens[group] = tokens
        elif own != tokens:
            other = f"earlier keys for {own}; use one block_tokens for all keys of a cache"
            if self._is_list:
                other = f"block_tokens of group {group} is {own}; make both equal, in the "
                other += "PrefixHasher or in the BlockGroup"
            name = self._name("keys", group)
            raise ValueError(f"{name} stand for {count_of(tokens, 'token')} each, but {other}")

    def read_blocks(
        self, gpu_block_ids: Any, layouts: Sequence[PagedLayout]
    ) -> tuple[list[array[int]], bool]:
        """The GPU blocks of each group, and whether one of them is -1. Raises IndexError if one
        does not exist."""
        several, some_left_out = [], False
        for group, ids in enumerate(self._split("gpu_block_ids", gpu_block_ids)):
            name, count = self._name("gpu_block_ids", group), layouts[group].num_blocks
            blocks, least, largest = native.read_ids(name, ids)
            several.append(blocks)
            some_left_out |= least == -1
            if least < -1 or largest >= count:
                at = next(at for at, block in enumerate(blocks) if not -1 <= block < count)
                raise IndexError(
                    f"{name}[{at}] is {blocks[at]}; there are {count} GPU blocks, 0 to "
                    f"{count - 1}, and -1 is a block that is not on the GPU"
                )
        return several, some_left_out

    def read(
        self,
        keys: Any,
        gpu_block_ids: Any,
        layouts: Sequence[PagedLayout],
        prefix: int | None = None,
    ) -> Prompt:
        """The blocks that are needed after a prefix; without one, those of the keys that have no
        block of -1.

        Raises what read_keys() and read_blocks() do, and ValueError if the two do not fit, or one
        of the needed blocks is missing.
        """
        of_groups = self.read_keys(keys)
        named, some_left_out = self.read_blocks(gpu_block_ids, layouts)
        for group, (of_group, per_page) in enumerate(zip(of_groups, self._per_page, strict=True)):
            count = len(of_group) // KEY_BYTES
            if -(-len(named[group]) // per_page) != count:
                name = self._name("gpu_block_ids", group)
                raise ValueError(
                    f"{name} has {count_of(len(named[group]), 'id')} for {count_of(count, 'key')} "
                    f"of {count_of(per_page, 'block')} each; pass one for each block of all keys, "
                    "-1 for a block that the request does not need on the GPU"
                )
        if prefix is not None:
            return self._needed(of_groups, named, prefix)
        return self._on_gpu(of_groups, named) if some_left_out else Prompt(of_groups, named, named)

    def read_distinct(
        self, keys: Any, gpu_block_ids: Any, layouts: Sequence[PagedLayout]
    ) -> Prompt:
        """What read() returns. Raises ValueError if a block occurs twice, such as a placeholder for
        missing ones."""
        prompt = self.read(keys, gpu_block_ids, layouts)
        for group, of_group in enumerate(prompt.named):
            numbers = np.sort(np.frombuffer(of_group, np.int64))
            twice = numbers[1:][(numbers[1:] == numbers[:-1]) & (numbers[1:] >= 0)]
            if len(twice):
                name, block = self._name("gpu_block_ids", group), int(twice[0])
                first = of_group.index(block)
                second = of_group.index(block, first + 1)
                raise ValueError(
                    f"{name}[{first}] and {name}[{second}] are both {block}, but no block has the "
                    "contents of two; pass -1 for blocks that are not on the GPU"
                )
        return prompt

    def select(
        self, blocks: Sequence[array[int]], key_indices: Sequence[Any]
    ) -> list[array[int] | Int64Array]:
        """Selects the GPU blocks of the keys with these indices, per group."""
        return [
            of_group if len(its) * per_page >= len(of_group) else _select(of_group, its, per_page)
            for of_group, its, per_page in zip(blocks, key_indices, self._per_page, strict=True)
        ]

    def _on_gpu(self, keys: list[bytes], named: list[array[int]]) -> Prompt:
        """The keys that have no block of -1."""
        prompt = Prompt([], [], named)
        for of_group, numbers, per_page in zip(keys, named, self._per_page, strict=True):
            rows = np.frombuffer(of_group, np.uint8).reshape(-1, KEY_BYTES)
            absent = np.flatnonzero(np.frombuffer(numbers, np.int64) == -1) // per_page
            present = np.delete(np.arange(len(rows)), absent)
            prompt.keys.append(rows[present].tobytes())
            prompt.blocks.append(array("q", _select(numbers, present, per_page).tobytes()))
        return prompt

    def _needed(self, keys: list[bytes], named: list[array[int]], prefix: int) -> Prompt:
        """The needed_blocks() of a prefix."""
        prompt = Prompt([], [], named)
        for group, positions in enumerate(needed_blocks(self._groups, prefix)):
            per_page, count = self._per_page[group], len(keys[group]) // KEY_BYTES
            first, end = positions.start, positions.stop
            if end > count:
                raise ValueError(
                    f"the prefix needs {count_of(end, 'block')}, but {self._name('keys', group)} "
                    f"has {count_of(count, 'key')}; pass what lookup() found for the same keys"
                )
            prompt.keys.append(keys[group][first * KEY_BYTES : end * KEY_BYTES])
            prompt.blocks.append(named[group][first * per_page : end * per_page])
            if -1 in prompt.blocks[group]:
                at = named[group].index(-1, first * per_page)
                raise ValueError(
                    f"{self._name('gpu_block_ids', group)}[{at}] is -1, but what follows the "
                    "prefix needs this block; pass a GPU block for each block of "
                    "manager.needed_blocks(prefix)"
                )
        return prompt

    def _split(self, name: str, argument: Any) -> Sequence[Any]:
        """The item of an argument for each group, as the caller has passed it."""
        return split_groups(name, argument, len(self._groups)) if self._is_list else [argument]

    def _name(self, argument: str, group: int) -> str:
        return f"{argument}[{group}]" if self._is_list else argument


def _select(blocks: array[int], key_indices: Any, per_page: int) -> Int64Array:
    """The GPU blocks of the keys with these indices."""
    numbers = np.frombuffer(blocks, np.int64)
    slots = np.asarray(key_indices, np.int64)[:, None] * per_page + np.arange(per_page)
    selected: Int64Array = numbers[slots[slots < len(numbers)]]
    return selected
