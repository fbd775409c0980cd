"""The native part of a BlockManager, csrc/prefix/manager.h."""

from __future__ import annotations

import ctypes
import weakref
from array import array
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from torch_kvswap._native import abi, loader
from torch_kvswap._native.abi import Int64Array
from torch_kvswap._native.arguments import NotCopyable
from torch_kvswap._native.loader import ForkGuard

POLICIES = ("lru", "arc")  # by number

# Calls that take keys or end reservations are first made with the GIL held. They return BLOCKS_BUSY
# if they would have to wait or take long, and are then repeated without the GIL (csrc/capi.h).
_holding = loader.holding()
_lookup, _prepare_load = _holding.kvswap_blocks_lookup, _holding.kvswap_blocks_prepare_load
_prepare_store, _end = _holding.kvswap_blocks_prepare_store, _holding.kvswap_blocks_end
_touch, _lease = _holding.kvswap_blocks_touch, _holding.kvswap_blocks_lease
_release, _order = _holding.kvswap_blocks_release, _holding.kvswap_blocks_order
_EVENTS_AT_ONCE = 1024


class NativeBlockManager(NotCopyable):
    """Owns the native block manager.

    In all methods, `digests` has the digests of all groups in a row, and `counts` the number of
    each group. grow() must be called first. Every method raises RuntimeError in a forked child.
    """

    def __init__(
        self,
        groups: Sequence[tuple[int, int, int]],
        policy: str,
        store_threshold: int,
        events: int,
    ) -> None:
        native = (abi.BlocksGroup * len(groups))(*(abi.BlocksGroup(*group) for group in groups))
        asked = sum(num_pages for num_pages, *_ in groups)
        options = abi.BlocksOptions(POLICIES.index(policy), events, store_threshold, asked)
        self._process = ForkGuard()
        self._pointer: int = loader.call(
            "kvswap_blocks_create", native, len(native), ctypes.byref(options)
        )
        weakref.finalize(self, _destroy, self._pointer, self._process)

    @property
    def pointer(self) -> int:
        """The native manager; raises RuntimeError in a forked child."""
        self._process.check("block manager")
        return self._pointer

    def grow(self, num_ready_pages: Sequence[int]) -> None:
        """Makes this many pages of each group usable."""
        ready = array("q", num_ready_pages)
        loader.call("kvswap_blocks_grow", self.pointer, ready.buffer_info()[0])

    def lookup(self, digests: bytes, counts: array[int], again: bool) -> tuple[int, int, int]:
        """Returns found, ready and pending, as in Lookup."""
        found = array("q", (0, 0, 0))  # laid out like abi.BlocksLookupResult, but faster
        place, into = counts.buffer_info()[0], found.buffer_info()[0]
        answer = _lookup(self.pointer, digests, place, again, into, False)
        if answer < 0:
            _call_without_gil(answer, "lookup", self.pointer, digests, place, again, into)
        return found[0], found[1], found[2]

    def prepare_load(self, digests: bytes, counts: array[int]) -> tuple[int, Int64Array]:
        """Returns the reservation, 0 for none, and its pages."""
        pages, into = _allocate(len(digests) // abi.DIGEST_BYTES)
        place = counts.buffer_info()[0]
        reservation: int = _prepare_load(self.pointer, digests, place, into, False)
        if reservation < 0:
            reservation = _call_without_gil(
                reservation, "prepare_load", self.pointer, digests, place, into
            )
        return reservation, pages

    def prepare_store(
        self, digests: bytes, counts: array[int], now: float, keep: bool
    ) -> tuple[int, int, Int64Array, Int64Array, array[int]] | None:
        """Prepares a store.

        Returns:
            reservation and lease (0 for none), key indices and pages (valid up to the sum of the
                counts), and the count of each group. None if there is no room.
        """
        count = len(digests) // abi.DIGEST_BYTES
        numbers, into = _allocate(2 * count)
        new, ids = array("q", counts), array("q", (0, 0))
        reservation = ids.buffer_info()[0]
        arguments = (
            *(self.pointer, digests, counts.buffer_info()[0], now, keep, into, into + 8 * count),
            *(new.buffer_info()[0], reservation, reservation + 8),
        )
        done: int = _prepare_store(*arguments, False)
        if done < 0:
            done = _call_without_gil(done, "prepare_store", *arguments)
        return (ids[0], ids[1], numbers[:count], numbers[count:], new) if done else None

    def end(self, reservation: int, succeeded: bool, rejected: array[int]) -> None:
        """Ends a reservation; `rejected` has ascending positions of its pages."""
        place, count = rejected.buffer_info()
        answer = _end(self.pointer, reservation, succeeded, place, count, False)
        if answer < 0:
            _call_without_gil(answer, "end", self.pointer, reservation, succeeded, place, count)

    def touch(self, digests: bytes, counts: array[int]) -> None:
        place = counts.buffer_info()[0]
        answer = _touch(self.pointer, digests, place, False)
        if answer < 0:
            _call_without_gil(answer, "touch", self.pointer, digests, place)

    def order(self, digests: bytes, counts: array[int], renew: bool) -> None:
        place = counts.buffer_info()[0]
        answer = _order(self.pointer, digests, place, renew, False)
        if answer < 0:
            _call_without_gil(answer, "order", self.pointer, digests, place, renew)

    def lease(self, digests: bytes, counts: array[int], now: float, seconds: float) -> int:
        """Returns the lease, 0 if a block is not cached."""
        place = counts.buffer_info()[0]
        lease: int = _lease(self.pointer, digests, place, now, seconds, False)
        if lease < 0:
            lease = _call_without_gil(lease, "lease", self.pointer, digests, place, now, seconds)
        return lease

    def release(self, lease: int) -> bool:
        """Returns whether the lease had not ended yet."""
        released: int = _release(self.pointer, lease, False)
        if released < 0:
            released = _call_without_gil(released, "release", self.pointer, lease)
        return released == 1

    def reset(self) -> None:
        loader.call("kvswap_blocks_reset", self.pointer)

    def take_events(self) -> Iterator[tuple[int, int, bytes]]:
        """Yields kind, group and key of each event."""
        events = np.empty(_EVENTS_AT_ONCE, abi.BLOCKS_EVENT)
        while True:
            count = loader.call(
                "kvswap_blocks_take_events", self.pointer, events.ctypes.data, len(events)
            )
            yield from events[:count].tolist()
            if count < len(events):
                return

    def stats(self, group: int, now: float) -> abi.BlocksStats:
        stats = abi.BlocksStats()
        loader.call("kvswap_blocks_stats_of", self.pointer, group, now, ctypes.byref(stats))
        return stats


def _allocate(count: int) -> tuple[Int64Array, int]:
    """An array of `count` numbers, and its address."""
    if count <= abi.BLOCKS_FEW_KEYS:
        few = array("q", bytes(count * 8))
        return np.frombuffer(few, np.int64), few.buffer_info()[0]
    many = np.empty(count, np.int64)  # does not write the memory, which would hold the GIL
    return many, many.ctypes.data


def _call_without_gil(answer: int, name: str, *arguments: Any) -> int:
    """Repeats a call that returned less than 0 with the GIL held, if it was busy.

    Returns:
        int: what the call returns, 0 or more.

    Raises:
        ValueError, MemoryError: the call failed.
    """
    if answer == abi.BLOCKS_BUSY:
        answer = getattr(loader.library(), f"kvswap_blocks_{name}")(*arguments, True)
    if answer < 0:
        loader.fail()
    return answer


def _destroy(pointer: int, process: ForkGuard) -> None:
    """Finalizer; does nothing in a forked child."""
    if process.is_current:
        loader.library().kvswap_blocks_destroy(pointer)
