"""Lazy storing: which blocks to store when blocks are about to leave the GPU cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch_kvswap.prefix.hashing import split_keys


class LazyStorePolicy:
    """Chooses what to store: blocks that leave the GPU cache, and all blocks before them.

    A common prefix may never leave the GPU. It is stored with the first block behind it that
    leaves, because that block could not be found without it. Pages that are already on the host are
    chosen, too; prepare_store() skips them and keeps them. Every block whose contents go must be
    named in chains_of() and forget() first; otherwise new contents would be stored under the old
    key. Not thread safe.

    Args:
        blocks_per_page (int): GPU blocks per key. The last key of a prompt may have fewer.
    """

    def __init__(self, blocks_per_page: int = 1) -> None:
        self._per_page = blocks_per_page
        self._parent: dict[bytes, bytes | None] = {}  # previous key, for each key on the GPU
        self._blocks: dict[bytes, list[int]] = {}  # GPU blocks, for each key on the GPU
        self._key: dict[int, bytes] = {}  # the key that a GPU block was last computed for
        self._loads: dict[bytes, tuple[Any, ...]] = {}  # from record(), for keys with loads

    def record(
        self, keys: bytes, gpu_block_ids: Sequence[int], loads: tuple[Any, ...] = ()
    ) -> int | None:
        """Records that a request's first blocks, one page for each key, were computed.

        Returns a block that had the contents of another key, which are lost.

        The keys are in a row and distinct, from the first block of the prompt on. `loads` are jobs
        that load blocks of the prompt, and are not reported yet.
        """
        parent, lost = None, None
        for place, key in enumerate(split_keys(keys)):
            blocks = list(gpu_block_ids[place * self._per_page : (place + 1) * self._per_page])
            for block in blocks:
                if self._key.get(block, key) != key and block in self._blocks.get(
                    self._key[block], ()
                ):
                    lost = block
                self._forget(block)
                self._key[block] = key
            # If a page has two copies on the GPU, keep the newer one, which leaves later.
            self._blocks[key], self._parent[key] = blocks, parent
            self._loads.pop(key, None)
            if loads:
                self._loads[key] = loads
            parent = key
        return lost

    def chains_of(
        self, gpu_block_ids: Iterable[int]
    ) -> list[tuple[bytes, list[int], tuple[Any, ...]]]:
        """What to store before these GPU blocks are reused or changed: consecutive pages of
        prompts, with their keys, GPU blocks, and the loads that these were computed from.
        """
        named = [self._key[block] for block in gpu_block_ids if block in self._key]
        keys = dict.fromkeys(key for key in named if key in self._blocks)
        # Only the last key of a chain is followed to the first page; `inner` are those before it.
        inner: set[bytes] = set()
        for key in keys:
            parent = self._parent[key]
            while parent is not None and parent in self._blocks and parent not in inner:
                inner.add(parent)
                parent = self._parent[parent]
        chains = [self._chain_to(key) for key in keys if key not in inner]
        return [
            (
                b"".join(chain),
                [block for key in chain for block in self._blocks[key]],
                tuple({load: None for key in chain for load in self._loads.get(key, ())}),
            )
            for chain in chains
        ]

    def clear(self) -> None:
        """Forgets all blocks."""
        for table in (self._parent, self._blocks, self._key, self._loads):
            table.clear()

    def forget(self, gpu_block_ids: Iterable[int]) -> None:
        """Records that these GPU blocks have left."""
        for block in gpu_block_ids:
            self._forget(block)

    def forget_computed(self, has_failed: Callable[[Any], bool]) -> None:
        """Forgets the blocks that were computed from a load that has failed."""
        failed = {load for loads in self._loads.values() for load in loads if has_failed(load)}
        for key in [key for key, loads in self._loads.items() if not failed.isdisjoint(loads)]:
            for block in self._blocks[key]:
                self._forget(block)

    def _chain_to(self, key: bytes) -> list[bytes]:
        """The keys from the first page of the prompt to this one.

        Starts behind the last page that has already left the GPU: that page and those before it
        were stored then.
        """
        chain: list[bytes] = []
        following: bytes | None = key
        while following is not None and following in self._blocks:
            chain.append(following)
            following = self._parent[following]
        return chain[::-1]

    def _forget(self, block: int) -> None:
        key = self._key.pop(block, None)
        if key is not None and block in self._blocks.get(key, ()):
            del self._blocks[key], self._parent[key]
            self._loads.pop(key, None)
