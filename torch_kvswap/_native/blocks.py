"""The native part of a block manager, csrc/prefix/manager.h."""

from __future__ import annotations

import ctypes
import weakref
from array import array
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from torch_kvswap._native import abi, loader
from torch_kvswap._native.arguments import NotCopyable
from torch_kvswap._native.fork_guard import Process
from torch_kvswap.prefix.digests import SLICE
from torch_kvswap.prefix.groups import BlockGroup, unit_tokens
from torch_kvswap.prefix.hashing import DIGEST_BYTES

POLICIES = ("lru", "arc")
Numbers: TypeAlias = npt.NDArray[np.int64]

# The calls that take keys or end jobs are made with the GIL held; they answer _BUSY when they would
# have to wait or to take long, and are made again without it (csrc/capi.h).
_holding = loader.holding()
_lookup, _prepare_load = _holding.kvswap_blocks_lookup, _holding.kvswap_blocks_prepare_load
_prepare_store, _end = _holding.kvswap_blocks_prepare_store, _holding.kvswap_blocks_end
_touch, _lease = _holding.kvswap_blocks_touch, _holding.kvswap_blocks_lease
_release, _order = _holding.kvswap_blocks_release, _holding.kvswap_blocks_order
_BUSY = -2
EVENT = np.dtype([("kind", np.int32), ("group", np.int32), ("key", f"V{DIGEST_BYTES}")])
_EVENTS_AT_ONCE = 1024


class Group(ctypes.Structure):
    _fields_ = (
        ("num_pages", ctypes.c_int64),
        ("ratio", ctypes.c_int64),
        ("window", ctypes.c_int64),
    )


class Options(ctypes.Structure):
    _fields_ = (
        ("policy", ctypes.c_int32),
        ("events", ctypes.c_int32),
        ("store_threshold", ctypes.c_int64),
        ("asked_capacity", ctypes.c_int64),
    )


class Found(ctypes.Structure):
    _fields_ = (
        ("found", ctypes.c_int64),
        ("ready", ctypes.c_int64),
        ("pending", ctypes.c_int64),
    )


class Stats(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_uint64)
        for name in (
            *("asked", "hits", "pending", "stored", "loaded", "evicted", "skipped"),
            *("refused", "failed", "pages", "free_pages", "idle_pages", "filling_pages"),
        )
    )


class NativeBlocks(NotCopyable):
    """Owns it. `digests`: those of all groups, one after another; `counts`: how many each group
    has. grow() is called first. Methods raise RuntimeError in a fork, whose pages are not its."""

    def __init__(
        self,
        groups: Sequence[BlockGroup],
        policy: str,
        store_threshold: int,
        events: int,
    ) -> None:
        unit = unit_tokens(groups)
        native = (Group * len(groups))(
            *(Group(group.num_pages, unit // group.block_tokens, group.window) for group in groups)
        )
        asked = sum(group.num_pages for group in groups)
        options = Options(POLICIES.index(policy), events, store_threshold, asked)
        self._process = Process()
        self._pointer: int = abi.call(
            "kvswap_blocks_create", native, len(native), ctypes.byref(options)
        )
        weakref.finalize(self, _destroy, self._pointer, self._process)

    @property
    def pointer(self) -> int:
        self._process.check("block manager")
        return self._pointer

    def grow(self, ready_pages: Sequence[int]) -> None:
        ready = array("q", ready_pages)
        abi.call("kvswap_blocks_grow", self.pointer, ready.buffer_info()[0])

    def lookup(self, digests: bytes, counts: array[int], again: bool) -> tuple[int, int, int]:
        found = array("q", (0, 0, 0))  # faster than a Found
        place, into = counts.buffer_info()[0], found.buffer_info()[0]
        answer = _lookup(self.pointer, digests, place, again, into, False)
        if answer < 0:
            _go_on(answer, "lookup", self.pointer, digests, place, again, into)
        return found[0], found[1], found[2]

    def prepare_load(self, digests: bytes, counts: array[int]) -> tuple[int, Numbers]:
        """The job, 0 for none, and its pages."""
        pages, into = _room(len(digests) // DIGEST_BYTES)
        place = counts.buffer_info()[0]
        job: int = _prepare_load(self.pointer, digests, place, into, False)
        if job < 0:
            job = _go_on(job, "prepare_load", self.pointer, digests, place, into)
        return job, pages

    def prepare_store(
        self, digests: bytes, counts: array[int], now: float, keep: bool
    ) -> tuple[int, int, Numbers, Numbers, array[int]] | None:
        """Job and lease, 0 for none; places and pages, of which the first are used; how many of
        them each group has. None when there is no room."""
        count = len(digests) // DIGEST_BYTES
        numbers, into = _room(2 * count)
        new, ids = array("q", counts), array("q", (0, 0))
        job = ids.buffer_info()[0]
        arguments = (
            *(self.pointer, digests, counts.buffer_info()[0], now, keep, into, into + 8 * count),
            *(new.buffer_info()[0], job, job + 8),
        )
        done: int = _prepare_store(*arguments, False)
        if done < 0:
            done = _go_on(done, "prepare_store", *arguments)
        return (ids[0], ids[1], numbers[:count], numbers[count:], new) if done else None

    def end(self, job: int, well: bool) -> None:
        answer = _end(self.pointer, job, well, False)
        if answer < 0:
            _go_on(answer, "end", self.pointer, job, well)

    def touch(self, digests: bytes, counts: array[int]) -> None:
        place = counts.buffer_info()[0]
        answer = _touch(self.pointer, digests, place, False)
        if answer < 0:
            _go_on(answer, "touch", self.pointer, digests, place)

    def order(self, digests: bytes, counts: array[int], renew: bool) -> None:
        place = counts.buffer_info()[0]
        answer = _order(self.pointer, digests, place, renew, False)
        if answer < 0:
            _go_on(answer, "order", self.pointer, digests, place, renew)

    def lease(self, digests: bytes, counts: array[int], now: float, seconds: float) -> int:
        place = counts.buffer_info()[0]
        lease: int = _lease(self.pointer, digests, place, now, seconds, False)
        if lease < 0:
            lease = _go_on(lease, "lease", self.pointer, digests, place, now, seconds)
        return lease

    def release(self, lease: int) -> bool:
        released: int = _release(self.pointer, lease, False)
        if released < 0:
            released = _go_on(released, "release", self.pointer, lease)
        return released == 1

    def reset(self) -> None:
        abi.call("kvswap_blocks_reset", self.pointer)

    def take_events(self) -> Iterator[tuple[int, int, bytes]]:
        """Kind, group and key of each."""
        events = np.empty(_EVENTS_AT_ONCE, EVENT)
        while True:
            count = abi.call("kvswap_blocks_events", self.pointer, events.ctypes.data, len(events))
            yield from events[:count].tolist()
            if count < len(events):
                return

    def stats(self, group: int, now: float) -> Stats:
        stats = Stats()
        abi.call("kvswap_blocks_stats_of", self.pointer, group, now, ctypes.byref(stats))
        return stats


def _room(count: int) -> tuple[Numbers, int]:
    """Memory for so many numbers, and its address."""
    if count <= SLICE:
        few = array("q", bytes(count * 8))
        return np.frombuffer(few, np.int64), few.buffer_info()[0]
    many = np.empty(count, np.int64)  # writes nothing to it while it holds the GIL
    return many, many.ctypes.data


def _go_on(answer: int, name: str, *arguments: Any) -> int:
    """What a call answers in the end that answered less than 0 with the GIL held.

    Raises:
        ValueError, MemoryError: the call has failed.
    """
    if answer == _BUSY:
        answer = getattr(loader.library(), f"kvswap_blocks_{name}")(*arguments, True)
    if answer < 0:
        abi.fail()
    return answer


def _destroy(pointer: int, process: Process) -> None:
    if process.is_current:
        loader.library().kvswap_blocks_destroy(pointer)
