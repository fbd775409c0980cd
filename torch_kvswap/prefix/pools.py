"""The pools of a prefix cache, and the arguments of its calls for each of them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np

from torch_kvswap._native.arguments import UINT64_MAX, Int64Array, count_of
from torch_kvswap._native.ids import split_groups
from torch_kvswap._native.loader import native
from torch_kvswap.host_pool.pool import HostPool
from torch_kvswap.layout import PagedLayout
from torch_kvswap.prefix.groups import BlockGroup
from torch_kvswap.prefix.hashing import DIGEST_BYTES, PrefixKeys, read_digests, split_digests


class Pools:
    """Host pools: their usable pages (`counts`), and the conversion of arguments per pool.

    Arguments are lists with one part per pool if `is_list`.

    The manager numbers the usable pages of each pool from 0 on.

    Args:
        pools (Sequence[HostPool]): one, or one for each group.
        groups (Sequence[BlockGroup] | None): of the pools, as read_layer_groups() returns them.
            Unless it is None, keys, ids and pages are lists with one entry per pool.

    Raises:
        ValueError: a pool has other pages than its group, or two pools share pages.
    """

    def __init__(self, pools: Sequence[HostPool], groups: Sequence[BlockGroup] | None) -> None:
        self._pools = pools
        self._groups = groups
        self.is_list = groups is not None
        self.counts = [pool.num_pages for pool in pools]
        named = self.counts if groups is None else [group.num_pages for group in groups]
        if named != self.counts:
            raise ValueError(
                f"the groups have {named} pages, their pools {self.counts}; "
                "make num_pages that of the pool"
            )
        for later, pool in enumerate(pools):
            for earlier in range(later):
                if pools[earlier]._memory is pool._memory:
                    raise ValueError(
                        f"host[{earlier}] and host[{later}] are the same pages, and a PrefixCache "
                        "assigns all pages of each; make a pool for each group"
                    )

    def split_keys(self, keys: Any) -> Sequence[Any]:
        """The keys for each pool. Raises ValueError if they are of other block_tokens than their
        group, which only the keys of a PrefixHasher say.
        """
        of_groups = self.split("keys", keys)
        for group, of in enumerate(self._groups or ()):  # one layout knows no number of tokens
            of_group, tokens = of_groups[group], of.block_tokens
            if isinstance(of_group, PrefixKeys) and of_group.block_tokens != tokens:
                raise ValueError(
                    f"keys[{group}] stand for {count_of(of_group.block_tokens, 'token')} each, but "
                    f"block_tokens of group {group} is {tokens}; make both equal, in the "
                    "PrefixHasher or in the BlockGroup"
                )
        return of_groups

    @property
    def ready(self) -> list[int]:
        """How many of these pages are ready by now, per pool."""
        return [pool.num_ready_pages for pool in self._pools]

    def select(self, blocks: Sequence[array[int]], key_indices: Any) -> list[Int64Array]:
        """Selects the GPU blocks of the keys with these indices, per pool."""
        indices = key_indices if self.is_list else [key_indices]
        return list(map(_select, self._pools, blocks, indices))

    def pages_with(self, positions: Sequence[int], blocks: Sequence[Int64Array]) -> list[int]:
        """The positions of the pages that hold these blocks of a job, which has full pages, except
        that the last one of a pool may have fewer blocks. The blocks of all pools count in a row,
        and so do the pages.
        """
        page_of_block: list[int] = []
        first_page = 0
        for pool, of_pool in zip(self._pools, blocks, strict=True):
            places = range(len(of_pool))
            page_of_block += [first_page + place // pool.blocks_per_page for place in places]
            first_page += -(-len(of_pool) // pool.blocks_per_page)
        return list(dict.fromkeys(page_of_block[position] for position in positions))

    def keys_of(
        self, positions: Sequence[int], digests: Sequence[bytes], key_indices: Any
    ) -> list[tuple[int, bytes]]:
        """The groups and digests of the pages of keys with these indices, by their positions, as
        pages_with() counts them.
        """
        of_groups = list(map(split_digests, digests))
        of_pages = [
            (group, of_groups[group][index])
            for group, indices in enumerate(key_indices if self.is_list else [key_indices])
            for index in indices
        ]
        return [of_pages[position] for position in positions]

    def read(self, keys: Any, gpu_block_ids: Any) -> tuple[list[bytes], list[array[int]]]:
        """Reads the arguments of a call: the digests and the GPU blocks of each pool."""
        digests = [
            read_digests(self.name_of("keys", group), of_pool)
            for group, of_pool in enumerate(self.split_keys(keys))
        ]
        blocks = self.read_blocks(gpu_block_ids)
        for group, (pool, of_pool) in enumerate(zip(self._pools, digests, strict=True)):
            count, per_page = len(of_pool) // DIGEST_BYTES, pool.blocks_per_page
            if -(-len(blocks[group]) // per_page) != count:
                name = self.name_of("gpu_block_ids", group)
                raise ValueError(
                    f"{name} has {count_of(len(blocks[group]), 'id')} for {count_of(count, 'key')} "
                    f"of {count_of(per_page, 'block')} each; pass one for each block of all keys, "
                    "-1 for a block that is not on the GPU"
                )
        return digests, blocks

    def keys_on_gpu(
        self, digests: list[bytes], blocks: list[array[int]]
    ) -> tuple[list[bytes], list[array[int]]]:
        """What read() returned, without the keys that have a block of -1."""
        kept_digests, kept_blocks = [], []
        for pool, of_pool, numbers in zip(self._pools, digests, blocks, strict=True):
            rows = np.frombuffer(of_pool, np.uint8).reshape(-1, DIGEST_BYTES)
            absent = np.flatnonzero(np.frombuffer(numbers, np.int64) == -1) // pool.blocks_per_page
            kept = np.delete(np.arange(len(rows)), absent)
            kept_digests.append(rows[kept].tobytes())
            kept_blocks.append(array("q", _select(pool, numbers, kept).tobytes()))
        return kept_digests, kept_blocks

    def check_needed(self, blocks: list[array[int]], needed: range | list[range]) -> None:
        """Raises ValueError if a key of BlockManager.needed_blocks() has a block of -1."""
        several = needed if isinstance(needed, list) else [needed]
        for group, (pool, of_pool, keys) in enumerate(
            zip(self._pools, blocks, several, strict=True)
        ):
            first, end = keys.start * pool.blocks_per_page, keys.stop * pool.blocks_per_page
            if -1 in of_pool[first:end]:
                at = of_pool.index(-1, first)
                name = self.name_of("gpu_block_ids", group)
                raise ValueError(
                    f"{name}[{at}] is -1, but what follows the prefix needs this block; pass a GPU "
                    "block for each block of manager.needed_blocks(prefix)"
                )

    def check_blocks(self, layouts: Sequence[PagedLayout], blocks: list[array[int]]) -> bool:
        """Whether one of the GPU blocks is -1. Raises IndexError if one does not exist."""
        some_left_out = False
        for group, (layout, of_pool) in enumerate(zip(layouts, blocks, strict=True)):
            count = layout.num_blocks
            numbers = np.frombuffer(of_pool, np.uint64)  # a negative one is larger than any block's
            if not len(numbers) or numbers.max() < count:
                continue
            some_left_out = True
            wrong = (numbers >= count) & (numbers != UINT64_MAX)
            if wrong.any():
                at = int(np.argmax(wrong))
                raise IndexError(
                    f"{self.name_of('gpu_block_ids', group)}[{at}] is {of_pool[at]}; there are "
                    f"{count} GPU blocks, 0 to {count - 1}, and -1 is a block that is not on the "
                    "GPU"
                )
        return some_left_out

    def check_distinct(self, blocks: list[array[int]]) -> None:
        """Raises ValueError if a block occurs twice, such as a placeholder for missing ones."""
        for group, of_pool in enumerate(blocks):
            numbers = np.sort(np.frombuffer(of_pool, np.int64))
            twice = numbers[1:][(numbers[1:] == numbers[:-1]) & (numbers[1:] >= 0)]
            if len(twice):
                name, block = self.name_of("gpu_block_ids", group), int(twice[0])
                first = of_pool.index(block)
                second = of_pool.index(block, first + 1)
                raise ValueError(
                    f"{name}[{first}] and {name}[{second}] are both {block}, but no block has the "
                    "contents of two; pass -1 for blocks that are not on the GPU"
                )

    def check_distinct_keys(self, digests: list[bytes]) -> None:
        """Raises ValueError if a key occurs twice; BlockManager.prepare_store() would, too."""
        for group, of_pool in enumerate(digests):
            name, first = self.name_of("keys", group), dict[bytes, int]()
            for index, key in enumerate(split_digests(of_pool)):
                if (before := first.setdefault(key, index)) != index:
                    raise ValueError(
                        f"{name}[{index}] is the same key as {name}[{before}]; name a block once"
                    )

    def read_blocks(self, gpu_block_ids: Any) -> list[array[int]]:
        """The GPU blocks of each pool."""
        return [
            native.read_ids(self.name_of("gpu_block_ids", group), ids)
            for group, ids in enumerate(self.split("gpu_block_ids", gpu_block_ids))
        ]

    def name_of(self, argument: str, group: int) -> str:
        """What errors call the part of an argument for this group."""
        return f"{argument}[{group}]" if self.is_list else argument

    def split(self, name: str, argument: Any) -> Sequence[Any]:
        """The part of an argument for each pool."""
        if not self.is_list:
            return [argument]
        return split_groups(name, argument, len(self._pools))

    def join(self, of_pools: Sequence[Any]) -> Any:
        """The parts of all pools in the form in which the caller passes arguments."""
        return of_pools if self.is_list else of_pools[0]


def _select(pool: HostPool, blocks: array[int], key_indices: Any) -> Int64Array:
    """The GPU blocks of the keys with these indices."""
    numbers, per_page = np.frombuffer(blocks, np.int64), pool.blocks_per_page
    slots = np.asarray(key_indices, np.int64)[:, None] * per_page + np.arange(per_page)
    selected: Int64Array = numbers[slots[slots < len(numbers)]]
    return selected
