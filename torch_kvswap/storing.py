"""When blocks of the GPU cache are stored: as soon as they are full, or just before they go."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from torch_kvswap.prefix_hash import DIGEST_BYTES


class Chain(NamedTuple):
    """Blocks of a prompt from its first one on: digests for prepare_store(), and where they are on
    the GPU."""

    keys: bytes
    gpu_block_ids: list[int]


class Storing(Protocol):
    """Says what to store now. The GPU blocks must not change until the store has ended. What is on
    a page already is named too: prepare_store() leaves it out, and keeps it. Not thread safe."""

    def computed(self, keys: bytes, gpu_block_ids: Sequence[int]) -> list[Chain]:
        """The first blocks of a request are full and have these keys, all or more than before."""

    def evicting(self, gpu_block_ids: Iterable[int]) -> list[Chain]:
        """These blocks will be given to others next."""


class EagerStoring:
    """Every block at once: each is stored once, whether or not it is ever asked for again."""

    def computed(self, keys: bytes, gpu_block_ids: Sequence[int]) -> list[Chain]:
        return [Chain(keys, list(gpu_block_ids))]

    def evicting(self, gpu_block_ids: Iterable[int]) -> list[Chain]:
        return []


class LazyStoring:
    """Only what leaves the GPU cache, with all blocks before it: a common prefix that never leaves
    it is stored with the first block behind it that does, which nobody could find without it."""

    def __init__(self) -> None:
        self._parent: dict[bytes, bytes | None] = {}  # of a key that is on the GPU
        self._block: dict[bytes, int] = {}
        self._key: dict[int, bytes] = {}

    def computed(self, keys: bytes, gpu_block_ids: Sequence[int]) -> list[Chain]:
        parent = None
        for place, block in enumerate(gpu_block_ids):
            key = keys[place * DIGEST_BYTES : (place + 1) * DIGEST_BYTES]
            if self._key.get(block) != key:
                self._forget(block)
                self._key[block] = key
            # Of two copies of a block either will do; the newer one leaves later.
            self._block[key], self._parent[key] = block, parent
            parent = key
        return []

    def evicting(self, gpu_block_ids: Iterable[int]) -> list[Chain]:
        leaving = list(gpu_block_ids)
        keys = [self._key[block] for block in leaving if block in self._key]
        chains = {key: self._chain_to(key) for key in keys}
        inner = {key for chain in chains.values() for key in chain[:-1]}
        found = [
            Chain(b"".join(chain), [self._block[key] for key in chain])
            for last, chain in chains.items()
            if last not in inner
        ]
        for block in leaving:
            self._forget(block)
        return found

    def _chain_to(self, key: bytes) -> list[bytes]:
        """From the first block on; from the first one that is still on the GPU if some have gone,
        which were stored then."""
        chain: list[bytes] = []
        following: bytes | None = key
        while following is not None and following in self._block:
            chain.append(following)
            following = self._parent[following]
        return chain[::-1]

    def _forget(self, block: int) -> None:
        key = self._key.pop(block, None)
        if key is not None and self._block.get(key) == block:
            del self._block[key], self._parent[key]
