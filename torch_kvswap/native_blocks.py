"""The native part of a block manager, csrc/blocks/manager.h."""

from __future__ import annotations

import ctypes
import weakref
from array import array
from collections.abc import Sequence

import numpy as np

from torch_kvswap import _extension, capi
from torch_kvswap.block_groups import BlockGroup, unit_tokens
from torch_kvswap.prefix_hash import DIGEST_BYTES
from torch_kvswap.process import Process

POLICIES = ("lru", "arc")

_native = _extension.library()
_lookup, _prepare_load = _native.kvswap_blocks_lookup, _native.kvswap_blocks_prepare_load
_prepare_store, _end = _native.kvswap_blocks_prepare_store, _native.kvswap_blocks_end
_touch, _lease = _native.kvswap_blocks_touch, _native.kvswap_blocks_lease
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


class NativeBlocks:
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
        self._pointer: int = capi.call(
            "kvswap_blocks_create", native, len(native), ctypes.byref(options)
        )
        weakref.finalize(self, _destroy, self._pointer, self._process)

    @property
    def pointer(self) -> int:
        self._process.check("block manager")
        return self._pointer

    def grow(self, ready_pages: Sequence[int]) -> None:
        ready = array("q", ready_pages)
        capi.call("kvswap_blocks_grow", self.pointer, ready.buffer_info()[0])

    def lookup(self, digests: bytes, counts: array[int], again: bool) -> tuple[int, int, int]:
        found = array("q", (0, 0, 0))  # faster than a Found
        places = counts.buffer_info()[0], found.buffer_info()[0]
        if not _lookup(self.pointer, digests, places[0], again, places[1]):
            capi.fail()
        return found[0], found[1], found[2]

    def prepare_load(self, digests: bytes, counts: array[int]) -> tuple[int, array[int]]:
        """The job, 0 for none, and its pages."""
        pages = array("q", bytes(len(digests) // DIGEST_BYTES * 8))
        place = counts.buffer_info()[0]
        job: int = _prepare_load(self.pointer, digests, place, pages.buffer_info()[0])
        if job < 0:
            capi.fail()
        return job, pages

    def prepare_store(
        self, digests: bytes, counts: array[int], now: float, keep: bool
    ) -> tuple[int, int, array[int], array[int], array[int]] | None:
        """Job and lease, 0 for none; places and pages, of which the first are used; how many of
        them each group has. None when there is no room."""
        empty = bytes(len(digests) // DIGEST_BYTES * 8)
        places, pages, new = array("q", empty), array("q", empty), array("q", counts)
        ids = array("q", (0, 0))
        job = ids.buffer_info()[0]
        done: int = _prepare_store(
            self.pointer,
            digests,
            counts.buffer_info()[0],
            now,
            keep,
            places.buffer_info()[0],
            pages.buffer_info()[0],
            new.buffer_info()[0],
            job,
            job + ids.itemsize,
        )
        if done < 0:
            capi.fail()
        return (ids[0], ids[1], places, pages, new) if done else None

    def end(self, job: int, well: bool) -> None:
        if not _end(self.pointer, job, well):
            capi.fail()

    def touch(self, digests: bytes, counts: array[int]) -> None:
        if not _touch(self.pointer, digests, counts.buffer_info()[0]):
            capi.fail()

    def order(self, digests: bytes, counts: array[int], renew: bool) -> None:
        capi.call("kvswap_blocks_order", self.pointer, digests, counts.buffer_info()[0], renew)

    def lease(self, digests: bytes, counts: array[int], now: float, seconds: float) -> int:
        place = counts.buffer_info()[0]
        lease: int = _lease(self.pointer, digests, place, now, seconds)
        if lease < 0:
            capi.fail()
        return lease

    def release(self, lease: int) -> bool:
        return bool(capi.call("kvswap_blocks_release", self.pointer, lease))

    def reset(self) -> None:
        capi.call("kvswap_blocks_reset", self.pointer)

    def take_events(self) -> list[tuple[int, int, bytes]]:
        """Kind, group and key of each."""
        taken: list[tuple[int, int, bytes]] = []
        events = np.empty(_EVENTS_AT_ONCE, EVENT)
        while True:
            count = capi.call("kvswap_blocks_events", self.pointer, events.ctypes.data, len(events))
            taken += events[:count].tolist()
            if count < len(events):
                return taken

    def stats(self, group: int, now: float) -> Stats:
        stats = Stats()
        capi.call("kvswap_blocks_stats_of", self.pointer, group, now, ctypes.byref(stats))
        return stats


def _destroy(pointer: int, process: Process) -> None:
    if process.is_current:
        _native.kvswap_blocks_destroy(pointer)
