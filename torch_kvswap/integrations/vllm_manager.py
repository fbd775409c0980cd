"""The scheduler's side of KVSwapOffloadingSpec: which chunk is on which host page."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload import base
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec, CPUOffloadingMetrics

from torch_kvswap.block_manager import BlockManager
from torch_kvswap.block_results import Load, Store
from torch_kvswap.prefix_hash import key_digest

Key = bytes  # vLLM's OffloadKey
# 0.26 has a name for the medium, later releases a member of an enum.
_MEDIUM = base.Medium.CPU if hasattr(base, "Medium") else "CPU"
_MISS, _HIT = base.LookupResult.MISS, base.LookupResult.HIT
_PENDING = base.LookupResult.HIT_PENDING


class _Filling(NamedTuple):
    """A store that has not ended."""

    store: Store
    keys: tuple[Key, ...]


class KVSwapManager(base.OffloadingManager):
    """A BlockManager behind vLLM's contract. Pages are of all groups of layers together: which of
    them a prefix needs is decided by vLLM, key by key.

    vLLM asks for one key at a time, as often as a request waits, so lookup() reads what this keeps
    in Python: the keys that have a page, and which of those are being filled. The scheduler's
    thread calls everything.
    """

    def __init__(self, num_pages: int, policy: str, store_threshold: int, events: bool) -> None:
        self._blocks = BlockManager(
            num_pages, policy=policy, store_threshold=max(store_threshold, 1), events=True
        )
        self._counts_offers = store_threshold > 1
        self._digests: dict[Key, bytes] = {}  # of what has a page
        self._keys: dict[bytes, Key] = {}  # the other way round
        self._filling: dict[Key, _Filling] = {}
        self._loads: dict[tuple[str, frozenset[Key]], Load] = {}
        self._events: list[Any] | None = [] if events else None
        self._sizes: list[int] = []  # of the stores since get_stats()
        self._skipped = 0

    def on_new_request(self, req_context: base.ReqContext) -> base.RequestOffloadingContext:
        return base.RequestOffloadingContext()

    def lookup(self, key: Key, req_context: base.ReqContext) -> base.LookupResult:
        if key not in self._digests:
            return _MISS
        return _PENDING if key in self._filling else _HIT

    def prepare_load(
        self, keys: Collection[Key], req_context: base.ReqContext
    ) -> base.LoadStoreSpec:
        if not keys:
            return CPULoadStoreSpec([])
        digests = self._known(keys)
        load = self._blocks.prepare_load(digests) if len(digests) == len(keys) else None
        if load is None:
            raise RuntimeError(
                f"request {req_context.req_id}: not all of the {len(keys)} chunks to load are "
                "stored; vLLM loads only what lookup() has just found"
            )
        self._loads[req_context.req_id, frozenset(keys)] = load
        return CPULoadStoreSpec(load.pages)

    def complete_load(self, keys: Collection[Key], req_context: base.ReqContext) -> None:
        """Ends the load of just these keys by this request: vLLM has one at a time."""
        if keys:
            self._blocks.complete(self._loads.pop((req_context.req_id, frozenset(keys))))

    def touch(self, keys: Collection[Key], req_context: base.ReqContext) -> None:
        self._blocks.touch(self._known(keys))

    def prepare_store(
        self, keys: Collection[Key], req_context: base.ReqContext
    ) -> base.PrepareStoreOutput | None:
        """keys_to_store are in the order of the keys: vLLM lists their blocks in that order."""
        keys = list(keys)
        digests = [self._digests.get(key) or key_digest(key) for key in keys]
        if self._counts_offers:
            self._blocks.lookup(digests)
        store = self._blocks.prepare_store(digests)
        if store is None:
            return None
        evicted = self._take_evicted()
        places = store.places.tolist()
        new = [keys[place] for place in places]
        if new:
            for place, key in zip(places, new, strict=True):
                self._digests[key], self._keys[digests[place]] = digests[place], key
            self._filling.update(dict.fromkeys(new, _Filling(store, tuple(new))))
            self._sizes.append(len(new))
        return base.PrepareStoreOutput(new, CPULoadStoreSpec(store.pages), evicted)

    def complete_store(
        self, keys: Collection[Key], req_context: base.ReqContext, success: bool = True
    ) -> None:
        """Ends the stores that fill the keys: vLLM names all keys of a store at once."""
        ended = {id(one): one for key in keys if (one := self._filling.get(key)) is not None}
        for filling in ended.values():
            (self._blocks.complete if success else self._blocks.fail)(filling.store)
            for key in filling.keys:
                del self._filling[key]
            if success:
                self._tell(filling.keys, removed=False)
            else:
                for key in filling.keys:
                    del self._keys[self._digests.pop(key)]

    def reset_cache(self) -> None:
        """vLLM says no more of the jobs that run: the workers wait for them before they do anything
        that it decides later, so that their pages are free now."""
        self._blocks.reset()
        open_jobs: list[Load | Store] = [*self._loads.values()]
        open_jobs += {id(one): one.store for one in self._filling.values()}.values()
        for job in open_jobs:
            self._blocks.fail(job)
        for known in (self._digests, self._keys, self._filling, self._loads):
            known.clear()
        self._blocks.events()

    def take_events(self) -> Iterable[Any]:
        taken, self._events = self._events or [], None if self._events is None else []
        return taken

    def get_load_source(self, key: Key, req_context: base.ReqContext) -> Any:
        from vllm.v1.metrics.cache_hit_source import CacheHitSource  # not in 0.26, nor asked there

        return CacheHitSource.HOST

    def get_stats(self) -> OffloadingConnectorStats:
        """Under the names of vLLM's own manager, so that dashboards go on."""
        stats, now = OffloadingConnectorStats(), self._blocks.stats()
        used = (now.pages - now.free_pages - now.idle_pages) / now.pages
        writing = now.filling_pages / now.pages
        stats.set_gauge(CPUOffloadingMetrics.CPU_CACHE_USAGE_PERC, used)
        stats.set_gauge(CPUOffloadingMetrics.CPU_CACHE_WRITE_USAGE_PERC, writing)
        stats.set_gauge(CPUOffloadingMetrics.CPU_CACHE_READ_USAGE_PERC, max(used - writing, 0.0))
        for size in self._sizes:
            stats.observe_histogram(CPUOffloadingMetrics.CPU_ALLOCATION_SIZE, size)
        self._sizes.clear()
        if self._counts_offers:
            skipped = now.skipped - self._skipped
            stats.increase_counter(CPUOffloadingMetrics.STORES_SKIPPED, skipped)
            self._skipped = now.skipped
        return stats

    def _known(self, keys: Collection[Key]) -> list[bytes]:
        """The digests of those that have a page."""
        return [digest for key in keys if (digest := self._digests.get(key)) is not None]

    def _take_evicted(self) -> list[Key]:
        events = self._blocks.events()
        evicted = [self._keys.pop(event.key) for event in events if event.kind == "evicted"]
        for key in evicted:
            del self._digests[key]
        if evicted:
            self._tell(evicted, removed=True)
        return evicted

    def _tell(self, keys: Iterable[Key], removed: bool) -> None:
        if self._events is not None:
            self._events.append(base.OffloadingEvent(list(keys), _MEDIUM, removed))
