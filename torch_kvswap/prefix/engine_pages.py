"""What a block manager numbers, as a handler wants it."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from torch_kvswap._native.ids import Ids, read_ids
from torch_kvswap.host_pool.pool import HostPool
from torch_kvswap.prefix.digests import Keys, read_digests
from torch_kvswap.prefix.hashing import DIGEST_BYTES

Numbers: TypeAlias = npt.NDArray[np.int64]


class EnginePages:
    """The pages of the pools that this process can use, from 0 on, and the GPU blocks of keys.

    is_list: whether keys, ids and pages are lists, with an entry for each pool.
    """

    def __init__(self, pools: Sequence[HostPool], is_list: bool) -> None:
        self._pools = pools
        self._is_list = is_list
        self.counts = [len(pool.own_pages) for pool in pools]

    @property
    def ready(self) -> list[int]:
        """How many of each pool are pinned by now."""
        return [pool.ready_pages for pool in self._pools]

    def in_pools(self, pages: Any) -> Any:
        """Their numbers in the pools."""

        def shift(pool: HostPool, _: str, pages: Numbers) -> Numbers:
            return pages + pool.own_pages.start

        return self._each(shift, pages)

    def select(self, keys: Any, gpu_block_ids: Any, places: Any) -> Any:
        """Of the GPU blocks of all keys those of some."""
        return self._each(_select, keys, gpu_block_ids, places)

    def read(self, keys: Any, gpu_block_ids: Any) -> list[tuple[bytes, array[int]]]:
        """The digests of each pool, and the GPU blocks."""
        read: Any = self._each(_read, keys, gpu_block_ids)
        return read if self._is_list else [read]

    def read_blocks(self, gpu_block_ids: Any) -> list[array[int]]:
        """The GPU blocks of each pool."""

        def blocks(pool: HostPool, name: str, ids: Ids) -> array[int]:
            return read_ids(name, ids)

        read: Any = self._each(blocks, gpu_block_ids)
        return read if self._is_list else [read]

    def only(self, group: int, value: Any) -> Any:
        """What a caller would pass who had it of one pool and nothing of the others."""
        if not self._is_list:
            return value
        return [value if index == group else [] for index in range(len(self._pools))]

    def name(self, group: int) -> str:
        """What a caller calls the GPU blocks of a group."""
        return f"gpu_block_ids[{group}]" if self._is_list else "gpu_block_ids"

    def _each(self, act: Callable[..., Any], *of_pools: Any) -> Any:
        if not self._is_list:
            return act(self._pools[0], self.name(0), *of_pools)
        count = len(self._pools)
        if not all(isinstance(several, Sequence) and len(several) == count for several in of_pools):
            raise ValueError(f"keys and gpu_block_ids must have a list for each of {count} groups")
        names = map(self.name, range(count))
        return [act(*one) for one in zip(self._pools, names, *of_pools, strict=True)]


def _read(pool: HostPool, name: str, keys: Keys, ids: Ids) -> tuple[bytes, array[int]]:
    digests = read_digests("keys", keys)
    return digests, _blocks_of(pool, name, digests, ids)


def _blocks_of(pool: HostPool, name: str, keys: Keys, ids: Ids) -> array[int]:
    """blocks_per_page blocks of each key; the last key may have fewer."""
    blocks, per_page = read_ids(name, ids), pool.blocks_per_page
    if isinstance(keys, bytes | bytearray | memoryview):
        count = memoryview(keys).nbytes // DIGEST_BYTES
    else:
        count = len(keys)
    if -(-len(blocks) // per_page) != count:
        raise ValueError(f"{name} has {len(blocks)} ids for {count} keys of {per_page} blocks each")
    return blocks


def _select(pool: HostPool, name: str, keys: Keys, ids: Ids, places: Any) -> Numbers:
    # The manager has read the keys: digests of them all are not made again.
    blocks = np.frombuffer(_blocks_of(pool, name, keys, ids), np.int64)
    per_page = pool.blocks_per_page
    slots = np.asarray(places, np.int64)[:, None] * per_page + np.arange(per_page)
    selected: Numbers = blocks[slots[slots < len(blocks)]]
    return selected
