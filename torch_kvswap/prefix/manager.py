"""Which prefix block is on which host page: what is found again, stored, and evicted."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, SupportsIndex

import numpy as np

from torch_kvswap._native.arguments import NotCopyable, read_int, read_seconds
from torch_kvswap._native.blocks import POLICIES, NativeBlocks, Numbers
from torch_kvswap.prefix.groups import (
    BlockGroup,
    needed_blocks,
    read_groups,
    read_ready_pages,
    unit_tokens,
)
from torch_kvswap.prefix.hashing import DIGEST_BYTES, Keys, cut_digests, join_digests, read_digests

EventKind = Literal["stored", "evicted", "cleared", "lost"]
EVENT_KINDS: tuple[EventKind, ...] = ("stored", "evicted", "cleared", "lost")


def event_bits(events: bool | Collection[EventKind]) -> int:
    """A bit for each kind that is asked for. Raises TypeError for no kinds at all, ValueError for
    what is no kind."""
    if isinstance(events, bool):
        events = EVENT_KINDS if events else ()
    if not isinstance(events, Iterable):
        raise TypeError(f"events is a {type(events).__name__}; pass True, False or a list of kinds")
    wanted: list[str] = [events] if isinstance(events, str) else list(events)
    unknown = sorted(repr(kind) for kind in wanted if kind not in EVENT_KINDS)
    if unknown:
        raise ValueError(f"events has {', '.join(unknown)}; kinds are {', '.join(EVENT_KINDS)}")
    if wanted:
        wanted += ["cleared", "lost"]
    return sum(1 << number for number, kind in enumerate(EVENT_KINDS) if kind in wanted)


class Lookup(NamedTuple):
    """Lengths of prefixes, in blocks (with several groups in units of `unit_tokens`): found, that
    is cached or on its way into the cache; ready, that can be loaded now. pending: blocks of
    `found` that are still on their way; while there are some, ask again later."""

    found: int
    ready: int
    pending: int


@dataclass(eq=False, slots=True)
class Load:
    """Pages to load, held until the load has ended. key_indices: the keys that they belong to; with
    several groups both are lists with an entry for each."""

    id: int
    key_indices: range | list[range]
    pages: Numbers | list[Numbers]


@dataclass(eq=False, slots=True)
class Store:
    """Keys that are new, by their indices among those given, and the pages that are to be filled
    with them, ascending; with several groups both are lists. id: 0 when there are none. lease: of
    preempt(), which has no end."""

    id: int
    key_indices: Numbers | list[Numbers]
    pages: Numbers | list[Numbers]
    lease: int = 0


class BlockEvent(NamedTuple):
    """kind: a block was stored or evicted (key: its digest); all were "cleared"; events were "lost"
    because nobody took them, so that only a new start of the bookkeeping helps."""

    kind: EventKind
    group: int
    key: bytes


@dataclass(frozen=True)
class BlockStats:
    """Blocks of a group since the start: asked for in lookups, hits (those that a prefix needed and
    were ready), pending, stored, loaded, evicted, skipped (not asked for often enough), failed.
    refused: stores without room. Pages now: those that can be used, and of these the free, idle
    (can be evicted) and filling ones; what is left is held by loads and leases."""

    asked: int
    hits: int
    pending: int
    stored: int
    loaded: int
    evicted: int
    skipped: int
    refused: int
    failed: int
    pages: int
    free_pages: int
    idle_pages: int
    filling_pages: int

    @property
    def hit_rate(self) -> float:
        return self.hits / self.asked if self.asked else 0.0


__all__ = ["BlockEvent", "BlockGroup", "BlockManager", "BlockStats", "Load", "Lookup", "Store"]


class BlockManager(NotCopyable):
    """Says which prefix blocks are on which host pages. Moves nothing: whoever copies asks for
    pages first and says afterwards how the copy ended.

    Keys stand for contents: whoever gives a key vouches that its block has it, and that a block
    behind another one is not used without it. A prompt's keys are the digests of
    PrefixHasher.keys() one after another, or a list of any keys that have one (`key_digest`).

    Until a Load or Store has ended, its pages are given to nobody else: every one must be ended
    with complete() or fail(), after the copy, also after a reset. Nothing has to be closed. A
    manager cannot be copied or pickled, and in a forked child every call raises RuntimeError.

    Any thread may call any method. Each call is atomic: what it answers was true at one moment. A
    call with up to 1,024 keys keeps the GIL for some hundred microseconds at most, unless it has to
    wait for another thread. With more keys it lets the GIL go, and reads lists of keys in slices.
    Other calls go on while reset() prepares new tables.

    Args:
        groups: the number of pages, or for a hybrid model a BlockGroup for each group of layers;
            then keys, key_indices and pages are lists with an entry for each.
        num_ready_pages: how many pages of each group, from the first one on, can be used already
            (a number, or a list of them); None: all. grow() adds others.
        policy: who is evicted, "lru" or "arc".
        store_threshold: a block is stored when so many lookups asked for it.
        events: whether events() has any, or of which kinds ("stored", "evicted"; the others always
            come with them).
        clock: seconds that never go back.

    Raises:
        TypeError, ValueError: an argument has a wrong type, or is out of range.
    """

    def __init__(
        self,
        groups: int | Sequence[BlockGroup],
        *,
        num_ready_pages: int | Sequence[int] | None = None,
        policy: str = "lru",
        store_threshold: int = 1,
        events: bool | Collection[EventKind] = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.groups = read_groups(groups)
        self.unit_tokens = unit_tokens(self.groups)
        if policy not in POLICIES:
            raise ValueError(f"policy is {policy!r}; it can be {' or '.join(POLICIES)}")
        threshold = read_int("store_threshold", store_threshold, 1, 2**32 - 1)
        if not callable(clock):
            raise TypeError(
                f"clock is a {type(clock).__name__}; pass a function that gives seconds"
            )
        ready = read_ready_pages(self.groups, num_ready_pages)
        self._is_list = not isinstance(groups, SupportsIndex)
        self._clock = clock
        native_groups = [
            (group.num_pages, self.unit_tokens // group.block_tokens, group.window)
            for group in self.groups
        ]
        self._native = NativeBlocks(native_groups, policy, threshold, event_bits(events))
        self._native.grow(ready)

    def grow(self, num_ready_pages: int | Sequence[int] | None = None) -> None:
        """From now on each group can use so many pages; None: all. A smaller number than before
        changes nothing. Raises ValueError for more than there are."""
        self._native.grow(read_ready_pages(self.groups, num_ready_pages))

    def lookup(self, keys: Keys | Sequence[Keys], *, again: bool = False) -> Lookup:
        """The longest prefix that is cached: of a sliding window or a state only what is needed
        behind it. Changes no order of eviction: touch() does, and prepare_load().

        keys: PrefixHasher.lookup_keys(), so that one token at least is left to compute. again: the
        same question as before, which counts neither for store_threshold nor in stats().
        """
        return Lookup._make(self._native.lookup(*self._digests(keys), again))

    def prepare_load(self, keys: Keys | Sequence[Keys], prefix: int | None = None) -> Load | None:
        """Holds the pages of the blocks until the load has ended; None when one of them is not
        ready, and then nothing is held. prefix: only the blocks that are needed behind a prefix of
        this length, such as `Lookup.ready`."""
        digests, counts = self._digests(keys)
        needed = [range(count) for count in counts]
        if prefix is not None:
            needed = needed_blocks(self.groups, read_int("prefix", prefix))
            digests, counts = cut_digests(digests, counts, needed)
        job, pages = self._native.prepare_load(digests, counts)
        if job == 0:
            return None
        return Load(job, needed if self._is_list else needed[0], self._split(pages, counts))

    def prepare_store(self, keys: Keys | Sequence[Keys]) -> Store | None:
        """Gives pages to the keys that have none, and evicts others for them; None, with nothing
        changed, when too few can be evicted. Until the store has ended lookups say that its blocks
        are pending, and blocks of these keys that are cached stay so. Raises ValueError for a key
        that is named twice."""
        return self._store(keys, keep=False)

    def preempt(self, keys: Keys | Sequence[Keys]) -> Store | None:
        """prepare_store() of all blocks of a request, whatever store_threshold says, that stay
        until release(store), also when the store has ended. To take them back: prepare_load(), then
        release()."""
        return self._store(keys, keep=True)

    def complete(self, job: Load | Store) -> None:
        """The copy has ended well, or was a load that was cancelled. Stored blocks can be loaded
        now, loaded ones evicted. Raises ValueError for a job that has ended before."""
        self._end(job, True)

    def fail(self, job: Load | Store) -> None:
        """The copy has failed, or was a store that was cancelled: its blocks are forgotten, those
        of a load too, whose bytes nobody can vouch for. Raises ValueError like complete()."""
        self._end(job, False)

    def touch(self, keys: Keys | Sequence[Keys]) -> None:
        """The blocks were used, such as in the GPU cache: those that are ready are evicted last."""
        self._native.touch(*self._digests(keys))

    def order(self, keys: Keys | Sequence[Keys], *, renew: bool = False) -> None:
        """Orders the eviction of a prompt that was stored in several steps: its end goes first.

        A store that names the whole prompt so far needs no such call. Nothing counts as a use, so
        that "arc" takes no block for one that is asked for often.

        Args:
            keys: a part of the prompt, in its order. Each block is evicted before the one in front
                of it. Blocks that are not cached, or that a job holds, are left out.
            renew: evict all of them after the blocks of others; False leaves the first one where it
                is, so that what was just stored goes before what was stored earlier.
        """
        self._native.order(*self._digests(keys), renew)

    def lease(self, keys: Keys | Sequence[Keys], seconds: float) -> int | None:
        """Keeps the blocks, ready or pending, from being evicted for so long, or until release(); a
        load needs its own prepare_load(). None when one of them is not cached."""
        seconds = read_seconds("seconds", seconds)
        if seconds == 0:
            raise ValueError("seconds is 0; a lease must last longer")
        digests, counts = self._digests(keys)
        return self._native.lease(digests, counts, self._clock(), seconds) or None

    def release(self, lease: int | Store) -> bool:
        """Ends a lease. False when it has ended before, by itself or in a reset."""
        return self._native.release(
            lease.lease if isinstance(lease, Store) else read_int("lease", lease)
        )

    def reset(self) -> None:
        """Forgets all blocks and leases, at once. Pages of jobs that are not ended become free when
        they are. Takes the memory of a second manager for a moment; MemoryError leaves all as it
        was."""
        self._native.reset()

    def events(self) -> list[BlockEvent]:
        """What has happened since the last call, in order, each event in one call only."""
        return [
            BlockEvent(EVENT_KINDS[kind], group, key)
            for kind, group, key in self._native.take_events()
        ]

    def stats(self, group: int = 0) -> BlockStats:
        """Counts the blocks and pages of a group.

        Args:
            group (int): its position in `groups`.

        Raises:
            ValueError: there is no such group.
        """
        group = read_int("group", group, 0, len(self.groups) - 1)
        native = self._native.stats(group, self._clock())
        return BlockStats(*(getattr(native, name) for name, *_ in native._fields_))

    def _end(self, job: Load | Store, succeeded: bool) -> None:
        if not isinstance(job, Load | Store):
            raise TypeError(f"job is a {type(job).__name__}; pass a Load or a Store")
        if job.id:
            self._native.end(job.id, succeeded)

    def _store(self, keys: Keys | Sequence[Keys], keep: bool) -> Store | None:
        stored = self._native.prepare_store(*self._digests(keys), self._clock(), keep)
        if stored is None:
            return None
        job, lease, key_indices, pages, counts = stored
        return Store(job, self._split(key_indices, counts), self._split(pages, counts), lease)

    def _digests(self, keys: Any) -> tuple[bytes, array[int]]:
        if not self._is_list:
            digests = read_digests("keys", keys)
            return digests, array("q", (len(digests) // DIGEST_BYTES,))
        if isinstance(keys, bytes | bytearray | memoryview | str) or not isinstance(keys, Sequence):
            kind = type(keys).__name__
            raise TypeError(f"keys is a {kind}; pass a list with the keys of each group")
        if len(keys) != len(self.groups):
            raise ValueError(f"keys must be a list with those of each of {len(self.groups)} groups")
        several = [read_digests(f"keys[{group}]", of_group) for group, of_group in enumerate(keys)]
        return join_digests(several), array("q", [len(one) // DIGEST_BYTES for one in several])

    def _split(self, numbers: Numbers, counts: array[int]) -> Numbers | list[Numbers]:
        """Of each group, of what are the numbers of all groups one after another."""
        if not self._is_list:
            return numbers[: counts[0]]
        return np.split(numbers[: sum(counts)], np.cumsum(counts)[:-1])
