"""Damage to host pages and to their checksums, at random, and who notices it."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
from drained import drain
from encoded_cache import EncodedCache
from logged import logged
from numpy.typing import NDArray

from torch_kvswap.host_pool.pool import HostPool

Bytes = NDArray[np.uint8]
HEAD = 32  # bytes of a row before its checksums
HOST_ONLY = range(8, 16)  # of a row: the number of the latest store


def rows_of(pool: HostPool) -> Bytes:
    """The checksums of a pool: uint8 [1 + slots, bytes of a row]."""
    shape, memory = pool._shape, pool._memory.mapping.tensor.numpy()
    rows: Bytes = memory[shape.table_begin :].reshape(-1, shape.row_bytes)
    return rows


def row_of(pool: HostPool, slot: int) -> Bytes:
    """The checksums of a slot, beside the pages or in the slot."""
    shape = pool._shape
    if shape._part is None:
        return rows_of(pool)[1 + slot]
    begin = slot * shape.slot_bytes + shape.part_begin + shape._part.checksums_begin
    row: Bytes = pool._memory.mapping.tensor.numpy()[begin : begin + shape.row_bytes]
    return row


class Damage:
    """Stores blocks into slots, damages one of them at a time, loads it, and undoes the damage.

    A cache of one group, with at least four blocks and pages of one slot. Block and page 0 are
    damaged; page 1 has another block, and page 0 had an older one.
    """

    def __init__(self, cache: EncodedCache, seed: int) -> None:
        self.cache, self.rng = cache, random.Random(seed)
        pool = cache.pools[0]
        sizes = pool._slabs.sizes
        nbytes = pool._encoding.for_native(sizes).slot_bytes  # without padding
        slots = pool.pages.flatten(0, 1).numpy()[:, :nbytes]
        self.slot: Bytes = slots[0]
        self.has_checksums = pool.verify != "off"
        self.row: Bytes = row_of(pool, 0) if self.has_checksums else np.zeros(0, np.uint8)
        if cache.driver is not None:
            cache.driver.set_mode("immediate")
        self._store([2, 3], [0, 1])
        self.old = self.slot.copy(), self.row.copy()
        self._store([0, 1], [0, 1])
        self.good = self.slot.copy(), self.row.copy()
        other_row = row_of(pool, 1) if self.has_checksums else self.row
        self.other = slots[1].copy(), other_row.copy()
        self.right = [cache.block(0), cache.block(1)]
        whole = int(sizes.sum())
        # Where the bytes of the slabs begin; those of an encoded slot have three quarters.
        self.begins = (
            nbytes + (np.cumsum(sizes) - sizes - whole) * (4 if pool.encoding == "raw" else 3) // 4
        )
        self.kinds: dict[str, Callable[[], None]] = {
            "bit": self._flip_bit,
            "swapped": lambda: self._set(self.other[0]),
            "foreign": lambda: self._set(*self.other),
            "torn": self._tear,
            "truncated": self._truncate,
            "old": lambda: self._set(self.old[0]),
            "never arrived": lambda: self._set(*self.old),
            "layers": self._swap_slabs,
        }
        if self.has_checksums:
            self.kinds["checksums"] = self._flip_checksum

    def _store(self, blocks: list[int], pages: list[int]) -> None:
        self._run(lambda: self.cache.store(blocks, pages, after=None))

    def _run(self, submit: Callable[[], Any]) -> Any:
        job = submit()
        drain(self.cache.handler)
        return job

    def _set(self, slot: Bytes, row: Bytes | None = None) -> None:
        """What the kernels write, so not the number of the latest store."""
        self.slot[:] = slot
        if row is not None:
            self.row[: HOST_ONLY.start] = row[: HOST_ONLY.start]
            self.row[HOST_ONLY.stop :] = row[HOST_ONLY.stop :]

    def _flip_bit(self) -> None:
        self.slot[self.rng.randrange(len(self.slot))] ^= 1 << self.rng.randrange(8)

    def _tear(self) -> None:
        at = self.rng.randrange(1, len(self.slot))
        self.slot[at:] = self.old[0][at:]

    def _truncate(self) -> None:
        self.slot[self.rng.randrange(len(self.slot)) :] = 0

    def _swap_slabs(self) -> None:
        """Two slabs of the same size."""
        one, two = self.rng.sample(range(len(self.begins)), 2)
        nbytes = min(int(np.diff(self.begins).min()), len(self.slot) - int(self.begins[-1]))
        first, second = (
            slice(int(self.begins[slab]), int(self.begins[slab]) + nbytes) for slab in (one, two)
        )
        swapped = self.slot[first].copy()
        self.slot[first] = self.slot[second]
        self.slot[second] = swapped

    def _flip_checksum(self) -> None:
        nbytes = HEAD + 8 * sum(-(-int(size) // 8192) for size in self.cache.layouts[0].sizes)
        places = [at for at in range(nbytes) if not 16 <= at < HEAD]
        self.row[self.rng.choice(places)] ^= 1 << self.rng.randrange(8)

    def run(self, count: int, **options: Any) -> Counter[str]:
        """Counts what became of so many loads of damaged pages: "noticed", "harmless" if the bytes
        are right, or the kind of the damage if nobody has noticed wrong bytes.
        """
        seen: Counter[str] = Counter()
        kinds = list(self.kinds)
        with logged():
            for number in range(count):
                kind = kinds[number % len(kinds)]
                self.kinds[kind]()
                job = self._run(lambda: self.cache.load([1, 0], [5, 4], after=None, **options))
                is_right = self.cache.is_same(4, self.right[0])
                if job.result.rejected == (1,):
                    seen["noticed"] += 1
                else:
                    assert job.result.ok
                    seen["harmless" if is_right else kind] += 1
                assert self.cache.is_same(5, self.right[1])
                self.slot[:], self.row[:] = self.good
                self.cache.clear(4, 5)
                self.cache.handler.poll()
        return seen
