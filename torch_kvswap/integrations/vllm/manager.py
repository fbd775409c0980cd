"""The scheduler's side of KVSwapOffloadingSpec: which chunk is on which host page."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload import base
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec, CPUOffloadingMetrics

from torch_kvswap.integrations.vllm.access import Access
from torch_kvswap.prefix.hashing import DIGEST_BYTES, key_digest
from torch_kvswap.prefix.manager import BlockManager, Load, Store

Key = bytes  # vLLM's OffloadKey
_GROUP_0 = bytes(4)
# 0.26 has a name for the medium, later releases a member of an enum.
_MEDIUM = base.Medium.CPU if hasattr(base, "Medium") else "CPU"
_MISS, _HIT = base.LookupResult.MISS, base.LookupResult.HIT
_PENDING = base.LookupResult.HIT_PENDING


@dataclass(eq=False)  # as a member of a set it is itself
class _Filling:
    """A store that has not ended."""

    store: Store
    keys: tuple[Key, ...]  # in the order of the prompt
    access: Access


def _digest(key: Key) -> bytes:
    """A block hash of vLLM is one already, but for the group of layers that is behind it."""
    if len(key) == DIGEST_BYTES + len(_GROUP_0) and key.endswith(_GROUP_0):
        return key[:DIGEST_BYTES]
    return key_digest(key)


class KVSwapManager(base.OffloadingManager):
    """A BlockManager behind vLLM's contract. Pages are of all groups of layers together: which of
    them a prefix needs is decided by vLLM, key by key.

    vLLM asks for one key at a time, as often as a request waits: lookup() reads what this keeps in
    Python. The scheduler's thread calls everything.

    A prompt is evicted from its end, though vLLM stores it in several steps: what has been stored
    goes directly before what is in front of it in the prompt, and when the request has ended, all
    of it is the newest. Only that, and a load, counts as a use of what another request had stored.
    """

    def __init__(self, num_pages: int, policy: str, store_threshold: int, events: bool) -> None:
        threshold = max(store_threshold, 1)
        self._blocks = BlockManager(
            num_pages, policy=policy, store_threshold=threshold, events=["evicted"]
        )
        self._counts_offers = threshold > 1
        self._states: dict[Key, base.LookupResult] = {}  # of what has a page
        self._digests: dict[Key, bytes] = {}
        self._keys: dict[bytes, Key] = {}
        self._filling: dict[Key, _Filling] = {}
        # The open loads of the same keys by one request: which of them ends first does not matter.
        self._loads: dict[tuple[str, frozenset[Key]], list[Load]] = {}
        self._cache = object()  # another one after a reset
        self._events: list[Any] | None = [] if events else None
        self._sizes: list[int] = []  # of the stores since get_stats()
        self._skipped = 0
        self._usage: dict[str, float] | None = None  # None: has changed

    def on_new_request(self, req_context: base.ReqContext) -> base.RequestOffloadingContext:
        return base.RequestOffloadingContext()

    def lookup(self, key: Key, req_context: base.ReqContext) -> base.LookupResult:
        return self._states.get(key, _MISS)

    def prepare_load(
        self, keys: Collection[Key], req_context: base.ReqContext
    ) -> base.LoadStoreSpec:
        if not keys:
            return CPULoadStoreSpec([])
        digests = self._known(keys)
        is_whole = len(digests) == DIGEST_BYTES * len(keys)
        load = self._blocks.prepare_load(digests) if is_whole else None
        if load is None:
            raise RuntimeError(
                f"request {req_context.req_id}: not all of the {len(keys)} chunks to load are "
                "stored; vLLM loads only what lookup() has just found"
            )
        self._loads.setdefault((req_context.req_id, frozenset(keys)), []).append(load)
        self._access(req_context).reuse(req_context, keys)
        self._usage = None
        return CPULoadStoreSpec(load.pages)

    def complete_load(self, keys: Collection[Key], req_context: base.ReqContext) -> None:
        """Ends a load of just these keys by this request."""
        if not keys:
            return
        name = req_context.req_id, frozenset(keys)
        loads = self._loads.get(name)
        if not loads:
            raise RuntimeError(
                f"request {req_context.req_id}: no load of these {len(name[1])} chunks is open"
            )
        self._blocks.complete(loads.pop())
        if not loads:
            del self._loads[name]
        self._usage = None

    def touch(self, keys: Collection[Key], req_context: base.ReqContext) -> None:
        """0.26 calls it for all keys of a request, also for what the request has stored itself,
        which is no reuse."""
        access = self._access(req_context)
        access.see(req_context, keys)
        access.reuse(req_context, self._ready(keys))
        self._renew(keys, access)

    def on_request_finished(self, req_context: base.ReqContext) -> None:
        """Stores of the request may still run: they end behind what is in front of them."""
        access = self._access(req_context)
        self._renew(access.keys, access)

    def _access(self, req_context: base.ReqContext) -> Access:
        return Access.of(req_context, self._cache)

    def _renew(self, keys: Collection[Key], access: Access) -> None:
        """Makes them the newest, from the last to the first; a reuse counts as a use."""
        self._blocks.touch(self._known([key for key in keys if key in access.reused]))
        self._blocks.order(self._known(keys), renew=True)

    def prepare_store(
        self, keys: Collection[Key], req_context: base.ReqContext
    ) -> base.PrepareStoreOutput | None:
        """keys_to_store are in the order of the keys: vLLM lists their blocks in that order."""
        keys = list(keys)
        digests = [self._digests.get(key) or _digest(key) for key in keys]
        if self._counts_offers:
            self._blocks.lookup(digests)
        access = self._access(req_context)
        access.reuse(req_context, self._ready(keys))
        store = self._blocks.prepare_store(digests)
        if store is None:
            return None
        evicted = self._take_evicted()
        places = np.asarray(store.key_indices).tolist()
        new = [keys[place] for place in places]
        if new:
            of_new = [digests[place] for place in places]
            self._digests.update(zip(new, of_new, strict=True))
            self._keys.update(zip(of_new, new, strict=True))
            access.insert(req_context, new)
            filling = _Filling(store, tuple(access.sort(new)), access)
            self._filling.update(dict.fromkeys(new, filling))
            self._states.update(dict.fromkeys(new, _PENDING))
            self._sizes.append(len(new))
            self._usage = None
        return base.PrepareStoreOutput(new, CPULoadStoreSpec(store.pages), evicted)

    def complete_store(
        self, keys: Collection[Key], req_context: base.ReqContext, success: bool = True
    ) -> None:
        """Ends the stores that fill the keys: vLLM names all keys of a store at once."""
        for filling in set(map(self._filling.get, keys)):
            if filling is None:
                continue
            self._usage = None
            (self._blocks.complete if success else self._blocks.fail)(filling.store)
            for key in filling.keys:
                del self._filling[key]
            if success:
                self._states.update(dict.fromkeys(filling.keys, _HIT))
                front = filling.access.before(filling.keys[0], self._is_ready)
                self._blocks.order(self._known([*([front] if front else ()), *filling.keys]))
                self._tell(filling.keys, removed=False)
            else:
                for key in filling.keys:
                    del self._states[key], self._keys[self._digests.pop(key)]

    def reset_cache(self) -> None:
        """vLLM says no more of the jobs that run: the workers wait for them before they do anything
        that it decides later, so that their pages are free now."""
        self._blocks.reset()
        open_jobs: list[Load | Store] = [*chain.from_iterable(self._loads.values())]
        open_jobs += {id(one): one.store for one in self._filling.values()}.values()
        for job in open_jobs:
            self._blocks.fail(job)
        for known in (self._states, self._digests, self._keys, self._filling, self._loads):
            known.clear()
        self._cache = object()
        self._blocks.events()
        self._usage = None

    def take_events(self) -> Iterable[Any]:
        taken, self._events = self._events or [], None if self._events is None else []
        return taken

    def get_load_source(self, key: Key, req_context: base.ReqContext) -> Any:
        from vllm.v1.metrics.cache_hit_source import CacheHitSource  # not in 0.26, nor asked there

        return CacheHitSource.HOST

    def get_stats(self) -> OffloadingConnectorStats:
        """Under the names of vLLM's own manager, so that dashboards go on."""
        stats = OffloadingConnectorStats()
        self._usage = self._usage or self._measure_usage()  # vLLM asks in every step
        for name, value in self._usage.items():
            stats.set_gauge(name, value)
        for size in self._sizes:
            stats.observe_histogram(CPUOffloadingMetrics.CPU_ALLOCATION_SIZE, size)
        self._sizes.clear()
        if self._counts_offers:
            skipped = self._blocks.stats().skipped
            stats.increase_counter(CPUOffloadingMetrics.STORES_SKIPPED, skipped - self._skipped)
            self._skipped = skipped
        return stats

    def _measure_usage(self) -> dict[str, float]:
        now = self._blocks.stats()
        used = (now.pages - now.free_pages - now.idle_pages) / now.pages
        writing = now.filling_pages / now.pages
        return {
            CPUOffloadingMetrics.CPU_CACHE_USAGE_PERC: used,
            CPUOffloadingMetrics.CPU_CACHE_WRITE_USAGE_PERC: writing,
            CPUOffloadingMetrics.CPU_CACHE_READ_USAGE_PERC: max(used - writing, 0.0),
        }

    def _ready(self, keys: Collection[Key]) -> list[Key]:
        return list(filter(self._is_ready, keys))

    def _is_ready(self, key: Key) -> bool:
        return self._states.get(key) is _HIT

    def _known(self, keys: Collection[Key]) -> bytes:
        """The digests of those that have a page, one after another."""
        return b"".join(filter(None, map(self._digests.get, keys)))

    def _take_evicted(self) -> list[Key]:
        events = self._blocks.events()
        evicted = [self._keys.pop(key) for kind, _, key in events if kind == "evicted"]
        for key in evicted:
            del self._digests[key], self._states[key]
        if evicted:
            self._tell(evicted, removed=True)
        return evicted

    def _tell(self, keys: Iterable[Key], removed: bool) -> None:
        if self._events is not None:
            self._events.append(base.OffloadingEvent(list(keys), _MEDIUM, removed))
