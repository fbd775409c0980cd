"""The scheduler side of KVSwapOffloadingSpec: which chunk is on which host page."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from itertools import chain
from typing import Any, Generic, TypeVar

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload import base
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec, CPUOffloadingMetrics
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from torch_kvswap._C import Reservation, fold_keys
from torch_kvswap.integrations.vllm.access import Access
from torch_kvswap.prefix.manager import BlockManager, BlockStats

Key = bytes  # vLLM's OffloadKey
_MISS, _HIT = base.LookupResult.MISS, base.LookupResult.HIT
_PENDING = base.LookupResult.HIT_PENDING
_Load = TypeVar("_Load")
FAILURES, PAGES = "kvswap:transfer_failures", "kvswap:pages"  # a counter and a gauge of our own


class HostManager(base.OffloadingManager, Generic[_Load]):
    """The common part of the managers of host memory and of a server. Only the scheduler's thread
    calls the methods.

    Args:
        info (Mapping[str, Any] | None): what config_info() reports.
    """

    def __init__(self, info: Mapping[str, Any] | None) -> None:
        self._info = info or {}
        self._failed: dict[int, str] = {}  # pages of jobs that have not ended, and why
        self._sizes: list[int] = []  # chunks per store since get_stats()
        # Loads that have not ended, by request and keys. A request may load the same keys several
        # times at once. These loads are interchangeable.
        self._loads: dict[tuple[str, frozenset[Key]], list[_Load]] = {}
        self._flushed: list[Callable[[], object]] = []  # end jobs that were open at a reset

    @abstractmethod
    def _begin_load(
        self, keys: Collection[Key], req_context: base.ReqContext
    ) -> tuple[_Load, Any] | None:
        """Holds the pages of keys. Returns the load, and the pages; None if a key has no page."""

    @abstractmethod
    def _end_load(self, load: _Load, keys: Collection[Key]) -> None:
        """Lets go of the pages of a load. Forgets the chunks on failed pages."""

    def prepare_load(
        self, keys: Collection[Key], req_context: base.ReqContext
    ) -> base.LoadStoreSpec:
        """Holds the pages of keys, which lookup() has just found, until the load has ended.

        Raises:
            RuntimeError: a key has no page.
        """
        begun = self._begin_load(keys, req_context)
        if begun is None:
            raise RuntimeError(
                f"request {req_context.req_id}: not all of the {len(keys)} chunks to load are on "
                "the host; vLLM loads only what lookup() has just found"
            )
        load, pages = begun
        self._loads.setdefault((req_context.req_id, frozenset(keys)), []).append(load)
        return CPULoadStoreSpec(pages)

    def complete_load(self, keys: Collection[Key], req_context: base.ReqContext) -> None:
        """Ends one load of exactly these keys by this request."""
        name = req_context.req_id, frozenset(keys)
        self._end_load(self._loads[name].pop(), keys)
        if not self._loads[name]:
            del self._loads[name]

    def on_reset_flushed(self) -> None:
        """Frees the pages of jobs that were open at a reset."""
        while self._flushed:
            self._flushed.pop()()

    def fail_pages(self, pages: Iterable[int], reason: str = "failed") -> None:
        """Names pages that an open store could not write, or an open load could not read. When it
        ends, their chunks are forgotten. reason: see Failure."""
        self._failed.update(dict.fromkeys(pages, reason))

    def _take_failed(self, pages: Iterable[int]) -> dict[int, str]:
        """Those of the pages of an ended job that have failed, and why."""
        return {page: self._failed.pop(page) for page in pages if page in self._failed}

    def config_info(self) -> list[Mapping[str, Any]]:
        """The labels of vLLM's metric vllm:kv_offload_config_info."""
        return [self._info]

    def get_load_source(self, key: Key, req_context: base.ReqContext) -> Any:
        return CacheHitSource.HOST

    def _stats_with(self, now: BlockStats | None) -> OffloadingConnectorStats:
        """Statistics under the names of vLLM's own manager, so that dashboards keep working, and
        the pages by state. vLLM's gauges count only pages in flight, which cannot be evicted."""
        stats = OffloadingConnectorStats()
        if now is not None:
            in_flight = now.pages - now.free_pages - now.idle_pages
            used, writing = in_flight / now.pages, now.filling_pages / now.pages
            stats.set_gauge(CPUOffloadingMetrics.CPU_CACHE_USAGE_PERC, used)
            stats.set_gauge(CPUOffloadingMetrics.CPU_CACHE_WRITE_USAGE_PERC, writing)
            stats.set_gauge(CPUOffloadingMetrics.CPU_CACHE_READ_USAGE_PERC, max(used - writing, 0))
            states = {"free": now.free_pages, "used": now.idle_pages, "in_flight": in_flight}
            for state, pages in states.items():
                stats.set_gauge(PAGES, pages, (state,))
        for size in self._sizes:
            stats.observe_histogram(CPUOffloadingMetrics.CPU_ALLOCATION_SIZE, size)
        self._sizes.clear()
        return stats


class KVSwapManager(HostManager[Reservation]):
    """A BlockManager behind vLLM's OffloadingManager interface.

    A page holds a chunk of one group of layers, and vLLM decides key by key which pages a prefix
    needs, for as long as a request waits, so lookup() reads a Python dict.

    A prompt is evicted from its end, although vLLM stores it in several steps: chunks to store are
    ordered directly behind the chunk in front of them, and when the request finishes, all its
    chunks become the newest. Only that and a load count as a use of chunks that another request had
    stored. The order does not depend on when copies end.

    Args:
        num_pages (int): host pages.
        policy, store_threshold: see SpecOptions.
        events (bool): record events for take_events().
        info (Mapping[str, Any] | None): what config_info() reports.
    """

    def __init__(
        self,
        num_pages: int,
        policy: str,
        store_threshold: int,
        events: bool,
        info: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(info)
        threshold = max(store_threshold, 1)
        self._blocks = BlockManager(num_pages, eviction_policy=policy, store_threshold=threshold)
        self._counts_offers = threshold > 1
        self._counts_uses = policy != "lru"  # "lru" knows only the order, which order() gives
        # Keys that have a page: _HIT, or the store that has not ended. A dictionary, because a
        # native lookup of one key takes longer.
        self._states: dict[Key, base.LookupResult | Reservation] = {}
        self._last_on_page: list[Key] = [b""] * num_pages  # tells the keys of evicted pages
        self._events: list[Any] | None = [] if events else None
        self._skipped = 0

    def on_new_request(self, req_context: base.ReqContext) -> base.RequestOffloadingContext:
        return base.RequestOffloadingContext()

    def lookup(self, key: Key, req_context: base.ReqContext) -> base.LookupResult:
        """The state of a key: a miss, a hit, or a hit that is still being stored."""
        state = self._states.get(key, _MISS)
        return _PENDING if isinstance(state, Reservation) else state

    def _begin_load(
        self, keys: Collection[Key], req_context: base.ReqContext
    ) -> tuple[Reservation, Any] | None:
        folded = fold_keys(keys)
        load = self._blocks.prepare_load(folded)
        if load is None:
            return None
        access = Access.of(req_context)
        access.see(req_context, keys, is_reused=True)
        placed = access.sort(keys)
        self._blocks.order(folded if placed == keys else fold_keys(placed), renew=True)
        return load, load.pages

    def _end_load(self, load: Reservation, keys: Collection[Key]) -> None:
        self._record_event(self._end(load), removed=True)

    def on_request_finished(self, req_context: base.ReqContext) -> None:
        """Makes the request's chunks the newest, even while they are being stored. A reuse counts
        as a use."""
        access = Access.of(req_context)
        if self._counts_uses:
            self._blocks.touch(fold_keys(list(filter(access.is_reused.get, access.keys))))
        self._blocks.order(fold_keys(access.keys), renew=True)

    def prepare_store(
        self, keys: Collection[Key], req_context: base.ReqContext
    ) -> base.PrepareStoreOutput | None:
        """Assigns pages to new keys, or None if there is no room.

        keys_to_store keeps the order of `keys`, because vLLM lists the GPU blocks in that order.
        They are placed behind the chunks in front of them. A page is not evicted before its store
        has ended: until then that can tell its place.
        """
        access = Access.of(req_context)
        keys = list(keys)
        ready = self._ready(keys)
        access.see(req_context, ready, is_reused=True)
        folded = fold_keys(keys)
        if self._counts_offers:
            self._blocks.lookup(folded)
        store = self._blocks.prepare_store(folded)
        if store is None:
            self._sizes.append(sum(key not in self._states for key in keys))
            return None
        if not store.id:
            return base.PrepareStoreOutput([], CPULoadStoreSpec([]), [])
        pages = store.pages.tolist()
        new = keys if len(pages) == len(keys) else [keys[at] for at in store.key_indices.tolist()]
        evicted = [self._last_on_page[page] for page in store.evicted]
        for key in evicted:
            del self._states[key]
        if evicted:
            self._record_event(evicted, removed=True)
        for key, page in zip(new, pages, strict=True):
            self._states[key], self._last_on_page[page] = store, key
        self._sizes.append(len(new))
        access.see(req_context, new)
        self._blocks.order(fold_keys(access.with_predecessor([*ready, *new], self._states)))
        return base.PrepareStoreOutput(new, CPULoadStoreSpec(store.pages), evicted)

    def complete_store(
        self, keys: Collection[Key], req_context: base.ReqContext, success: bool = True
    ) -> None:
        """Ends the stores of these keys. vLLM names all keys of a store at once, in any order."""
        stored: list[Key] = []
        lost: list[Key] = []
        for store in dict.fromkeys(self._states[key] for key in keys):
            assert isinstance(store, Reservation)
            pages = store.pages.tolist()
            if not success:
                self.fail_pages(pages)
            in_order = [self._last_on_page[page] for page in pages]
            lost += self._end(store)
            stored += (key for key in in_order if key in self._states)
        self._states.update(dict.fromkeys(stored, _HIT))
        self._record_event(stored, removed=False)
        if lost:
            self._record_event(lost, removed=True, metadata_only=True)

    def _end(self, reservation: Reservation) -> list[Key]:
        """Ends a store or a load, and returns the keys of its failed pages, which are forgotten.

        Another load may have forgotten a page before, whose key may be on another page by now.
        """
        if not self._failed:
            self._blocks.complete(reservation)
            return []
        pages = reservation.pages.tolist()
        failed = self._take_failed(pages)
        self._blocks.complete(reservation, [at for at, page in enumerate(pages) if page in failed])
        lost = []
        for page in failed:
            if key := self._last_on_page[page]:
                self._last_on_page[page] = b""
                del self._states[key]
                lost.append(key)
        return lost

    def reset_cache(self) -> None:
        """Forgets all chunks.

        vLLM does not report the jobs of open reservations any more. It calls on_reset_flushed()
        when all workers have ended them, and until then their pages are not used again: a worker
        that is ahead of another one could overwrite what that one still reads.
        """
        # vLLM's AllBlocksCleared means the GPU, and does not come while requests run.
        if stored := self._ready(self._states):
            self._record_event(stored, removed=True)
        self._blocks.reset()
        stores = {state for state in self._states.values() if isinstance(state, Reservation)}
        for reservation in (*chain(*self._loads.values()), *stores):
            self._flushed.append(partial(self._blocks.fail, reservation))
        for known in (self._states, self._loads, self._failed):
            known.clear()

    def take_events(self) -> Iterable[Any]:
        taken, self._events = self._events or [], None if self._events is None else []
        for event in taken:
            if getattr(event, "metadata_only", False):  # a key may be stored again by now
                event.keys = [key for key in event.keys if key not in self._states]
        return [event for event in taken if event.keys]

    def get_stats(self) -> OffloadingConnectorStats:
        now = self._blocks.stats()
        stats = self._stats_with(now)
        if self._counts_offers:
            stats.increase_counter(CPUOffloadingMetrics.STORES_SKIPPED, now.skipped - self._skipped)
            self._skipped = now.skipped
        return stats

    def _ready(self, keys: Collection[Key]) -> list[Key]:
        return [key for key in keys if self._states.get(key) is _HIT]

    def _record_event(self, keys: Iterable[Key], removed: bool, **details: bool) -> None:
        if self._events is not None:
            self._events.append(
                base.OffloadingEvent(list(keys), base.Medium.CPU, removed, **details)
            )
