"""Which blocks of the GPU cache are stored when they are about to leave it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torch_kvswap.prefix.hashing import DIGEST_BYTES


class Chain(NamedTuple):
    """Pages of a prompt from its first one on: digests for prepare_store(), and the blocks that
    they have on the GPU."""

    keys: bytes
    gpu_block_ids: list[int]


class LazyStorePolicy:
    """Names only what leaves the GPU cache, with all that is before it: a common prefix that never
    leaves is stored with the first block behind it that does, which nobody could find without it.

    blocks_per_page: GPU blocks that a key stands for; the last key of a prompt may have fewer. What
    is on a page already is named too: prepare_store() leaves it out, and keeps it. Whoever gives a
    block to others without a word here stores what they write under the old key. Not thread safe.
    """

    def __init__(self, blocks_per_page: int = 1) -> None:
        self._per_page = blocks_per_page
        self._parent: dict[bytes, bytes | None] = {}  # of a key that is on the GPU
        self._blocks: dict[bytes, list[int]] = {}  # of such a key
        self._key: dict[int, bytes] = {}  # that a block was last computed for

    def computed(self, keys: bytes, gpu_block_ids: Sequence[int]) -> None:
        """The first blocks of a request are full and have these keys, all or more than before."""
        parent = None
        for place in range(len(keys) // DIGEST_BYTES):
            key = keys[place * DIGEST_BYTES : (place + 1) * DIGEST_BYTES]
            blocks = list(gpu_block_ids[place * self._per_page : (place + 1) * self._per_page])
            for block in blocks:
                if self._key.get(block) != key:
                    self._forget(block)
                    self._key[block] = key
            # Of two copies of a page either will do; the newer one leaves later.
            self._blocks[key], self._parent[key] = blocks, parent
            parent = key

    def chains_of(self, gpu_block_ids: Iterable[int]) -> list[Chain]:
        """What to store before these blocks are given to others, or change."""
        keys = [self._key[block] for block in gpu_block_ids if block in self._key]
        chains = {key: self._chain_to(key) for key in keys if key in self._blocks}
        inner = {key for chain in chains.values() for key in chain[:-1]}
        return [
            Chain(b"".join(chain), [block for key in chain for block in self._blocks[key]])
            for last, chain in chains.items()
            if last not in inner
        ]

    def forget(self, gpu_block_ids: Iterable[int]) -> None:
        """Their chains are stored, or need not be: the blocks have left."""
        for block in gpu_block_ids:
            self._forget(block)

    def _chain_to(self, key: bytes) -> list[bytes]:
        """From the first page on; from the first one that is still on the GPU if some have gone,
        which were stored then."""
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
