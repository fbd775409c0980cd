"""vLLM's secondary tiers below our host memory. They, and the manager above them, stay vLLM's."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import logging
from collections import Counter
from collections.abc import Collection
from dataclasses import replace
from typing import Any

from vllm.v1.kv_offload import base
from vllm.v1.kv_offload.config import OffloadingConfig
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.tiering import manager as of_vllm
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

from torch_kvswap._C import LoadReservation, StoreReservation, fold_keys
from torch_kvswap.integrations.vllm.canonical import Share, is_canonical, kv_heads
from torch_kvswap.integrations.vllm.options import SpecOptions, read_options, read_tiers
from torch_kvswap.integrations.vllm.pool import Replicas
from torch_kvswap.integrations.vllm.rows import ROW_ALIGNMENT, Rows, RowsOffer
from torch_kvswap.integrations.vllm.scheduler_side import Key, KVSwapManager
from torch_kvswap.integrations.vllm.spec import KVSwapOffloadingSpec

_log = logging.getLogger(__name__)


class PrimaryTier(KVSwapManager):
    """A KVSwapManager whose pages vLLM's tiers read and write, under the names that vLLM's
    TieringOffloadingManager calls.

    A chunk with a slot that holds no block is forgotten when its store ends: a block did not fit,
    or a tier has read something else. So no tier is given one.

    Args:
        rows (Rows): the pages.
        others: arguments of KVSwapManager.
    """

    def __init__(self, rows: Rows, *others: Any) -> None:
        super().__init__(*others)
        self._rows: Rows | None = rows
        self._num_chunks = rows.num_pages  # vLLM reads it
        self._written: set[int] = set()  # pages that a tier has filled
        # By request and keys: the reads that are open, and how many of them have ended. Several of
        # the same keys end together, because nothing tells which one has ended.
        self._reads: dict[tuple[str, frozenset[Key]], list[LoadReservation]] = {}
        self._ended: Counter[tuple[str, frozenset[Key]]] = Counter()
        self._has_unreadable = False  # some request has unreadable keys
        self._damaged: set[Key] = set()  # what tiers have of them could not be loaded

    def get_kv_memoryview(self) -> memoryview:
        """All pages, uint8 [pages, bytes of a page]."""
        return self._rows_in_use.memory

    @property
    def _rows_in_use(self) -> Rows:
        assert self._rows is not None, "it is shut down"
        return self._rows

    def lookup(self, key: Key, req_context: base.ReqContext) -> base.LookupResult:
        """As KVSwapManager's, but a request does not start with it: vLLM also looks up what it
        cascades. KVSwapTieringManager says when one starts."""
        return self._state_of(key)

    def restart(self, req_context: base.ReqContext) -> None:
        """The request starts, perhaps again after a reset: see KVSwapManager.lookup()."""
        super().lookup(b"", req_context)

    def ready(self, keys: Collection[Key]) -> list[Key]:
        """Those of the keys that are stored."""
        return self._ready(keys)

    def prepare_read(
        self, keys: Collection[Key], req_context: base.ReqContext
    ) -> base.LoadStoreSpec:
        """Holds the pages of stored keys for a tier that reads them. Does not count as a use."""
        read = self._blocks.prepare_load(fold_keys(keys), is_use=False)
        if read is None:
            raise RuntimeError(
                f"request {req_context.req_id}: not all of the {len(keys)} chunks that a tier is "
                "to read are stored"
            )
        self._reads.setdefault((req_context.req_id, frozenset(keys)), []).append(read)
        self._usage = None
        return CPULoadStoreSpec(read.pages)

    def complete_read(self, keys: Collection[Key], req_context: base.ReqContext) -> None:
        """A tier has read, or failed to read, the pages of exactly these keys."""
        name = req_context.req_id, frozenset(keys)
        self._ended[name] += 1
        if self._ended[name] < len(self._reads[name]):
            return
        del self._ended[name]
        for read in self._reads.pop(name):
            self._record_event(self._end(read), removed=True)

    def prepare_write(
        self, keys: Collection[Key], req_context: base.ReqContext
    ) -> base.PrepareStoreOutput | None:
        """Assigns pages to keys that a tier is to fill. None if there is no room.

        vLLM calls it key by key, and complete_write() for many of them, which gets the order.
        """
        return self._reserve(list(keys))

    def complete_write(
        self, keys: Collection[Key], req_context: base.ReqContext, success: bool = True
    ) -> None:
        """A tier has filled the pages of these keys, or failed to."""
        pages = self._pages_of_stores(keys)
        self._written.update(pages)
        access = self._access(req_context)
        if success:
            self._rows_in_use.adopt(pages)
            self._place(list(keys), (), access, req_context)
        self._end_stores(keys, pages, req_context, success)
        lost = [key for key in keys if key not in self._states]
        if lost:
            self._has_unreadable = True
            access.unreadable.update(lost)

    def is_readable(self, key: Key, req_context: base.ReqContext) -> bool:
        """Whether no tier has failed to read the chunk for this request, nor read a damaged one.
        vLLM's tiers go on saying that they have it, and do not replace what they have."""
        if key in self._damaged:
            return False
        return not self._has_unreadable or key not in self._access(req_context).unreadable

    def prepare_load(
        self, keys: Collection[Key], req_context: base.ReqContext
    ) -> base.LoadStoreSpec:
        """As KVSwapManager's. Tells the workers, in `written`, which pages a tier has filled."""
        spec = super().prepare_load(keys, req_context)
        spec.written = self._written.intersection(spec.block_ids.tolist())
        return spec

    def complete_load(self, keys: Collection[Key], req_context: base.ReqContext) -> None:
        self._damaged.update(self._last_on_page[page] for page in self._failed & self._written)
        super().complete_load(keys, req_context)

    def prepare_store(
        self, keys: Collection[Key], req_context: base.ReqContext
    ) -> base.PrepareStoreOutput | None:
        output = super().prepare_store(keys, req_context)
        if output is not None:
            self._written.difference_update(output.store_spec.block_ids.tolist())
        return output

    def complete_store(
        self, keys: Collection[Key], req_context: base.ReqContext, success: bool = True
    ) -> None:
        self._end_stores(keys, self._pages_of_stores(keys), req_context, success)

    def _end_stores(
        self,
        keys: Collection[Key],
        pages: Collection[int],
        req_context: base.ReqContext,
        success: bool,
    ) -> None:
        if success:
            self.fail_pages(self._rows_in_use.without_blocks(pages))
        super().complete_store(keys, req_context, success)

    def _pages_of_stores(self, keys: Collection[Key]) -> list[int]:
        """The pages of the open stores of these keys."""
        states = map(self._states.get, keys)
        stores = {state for state in states if isinstance(state, StoreReservation)}
        return [page for store in stores for page in store.pages.tolist()]

    def reset_cache(self) -> None:
        """As KVSwapManager's. vLLM has waited for the tiers before."""
        for reads in self._reads.values():
            self._flushed += reads
        self._reads.clear()
        self._ended.clear()
        self._written.clear()
        super().reset_cache()

    def shutdown(self) -> None:
        """Lets go of the memory, which is unmapped when no tier has a view of it."""
        self._rows = None


class KVSwapTieringManager(of_vllm.TieringOffloadingManager):
    """vLLM's manager of tiers above a PrimaryTier.

    vLLM's keeps from its primary tier when requests start, and when all workers have ended their
    jobs after a reset. It also gives all chunks of a store to the tiers, stored or not.
    """

    primary_tier: PrimaryTier

    def on_new_request(self, req_context: base.ReqContext, **options: Any) -> Any:
        self.primary_tier.on_new_request(req_context)
        return super().on_new_request(req_context, **options)

    def lookup(self, key: Key, req_context: base.ReqContext, **options: Any) -> base.LookupResult:
        self.primary_tier.restart(req_context)
        if not self.primary_tier.is_readable(key, req_context):
            return self.primary_tier.lookup(key, req_context)
        return super().lookup(key, req_context, **options)

    def complete_store(
        self, keys: Collection[Key], req_context: base.ReqContext, success: bool = True
    ) -> None:
        """As vLLM's, with the chunks that were stored."""
        self.primary_tier.complete_store(keys, req_context, success)
        stored = self.primary_tier.ready(keys)
        super().complete_store(stored, req_context, success and bool(stored))

    def fail_pages(self, pages: Collection[int]) -> None:
        self.primary_tier.fail_pages(pages)

    def on_reset_flushed(self) -> None:
        self.primary_tier.on_reset_flushed()
        super().on_reset_flushed()


class KVSwapTieringOffloadingSpec(KVSwapOffloadingSpec):
    """A KVSwapOffloadingSpec with vLLM's secondary tiers below the host memory.

    The workers start first. Worker 0 offers its pages, and the scheduler maps them for the tiers.

    Args:
        config (OffloadingConfig): `extra_config` has the SpecOptions, and `secondary_tiers`,
            `tier_poll_interval_s` and `backpressure` as vLLM's TieringOffloadingSpec.

    Raises:
        ValueError: an option is unknown, missing or invalid, or the model is divided in a way that
            rows are not made for.
    """

    _row_alignment = ROW_ALIGNMENT

    def __init__(self, config: OffloadingConfig) -> None:
        interval = of_vllm.DEFAULT_TIER_POLL_INTERVAL_S
        self._tiers, self._poll_interval = read_tiers(config.extra_config, interval)
        super().__init__(config)
        self._is_canonical = is_canonical(config, self.options)
        self._share: Share | None = None  # of this worker, if so
        of = config.parallel
        if of.pp_size * of.pcp_size > 1:
            raise ValueError(
                f"spec_name is KVSwapTieringOffloadingSpec, but pipeline_parallel_size is "
                f"{of.pp_size} and prefill_context_parallel_size {of.pcp_size}, which must be 1 "
                "there; use TieringOffloadingSpec"
            )

    def _read_options(self) -> SpecOptions:
        options = read_options(self.extra_config, has_tiers=True)
        for name, value, instead in (
            ("store_threshold", max(options.store_threshold, 1), 1),
            ("host_server", options.host_server, None),
        ):
            if value != instead:
                raise ValueError(
                    f"kv_connector_extra_config: {name} is {value!r}, which is not possible with "
                    "spec_name KVSwapTieringOffloadingSpec; leave it out"
                )
        return options

    def get_worker(self, kv_caches: base.CanonicalKVCaches) -> base.OffloadingWorker:
        """The worker, made at the first call."""
        if self._is_canonical and self._share is None:
            self._share = Share.of(kv_caches, kv_heads())
            self._size_pools(self._share.part[1])
        return super().get_worker(kv_caches)

    def _replicas(self) -> Replicas | None:
        replicas = super()._replicas()
        if replicas is None or self._share is None:
            return replicas
        return replicas._replace(part=self._share.part)

    def _rows_offer(self) -> RowsOffer:
        return RowsOffer(self.config.engine_id, self.config.kv_cache_layout, self._share)

    def _make_manager(self) -> base.OffloadingManager:
        rows = Rows(self.config.engine_id)
        # Only the workers know into how many parts canonical rows are divided.
        self.num_pages, self._chunk_bytes = rows.num_pages, rows.row_bytes
        primary = PrimaryTier(rows, *self._of_manager())
        how = {"tier_poll_interval_s": self._poll_interval}
        with contextlib.ExitStack() as made:
            made.callback(primary.shutdown)
            tiers = []
            for at, tier in enumerate(self._tiers):
                tiers.append(self._make_tier(at, tier, rows))
                made.callback(tiers[-1].shutdown)
            manager = KVSwapTieringManager(primary, tiers, **how)
            made.pop_all()
        return manager

    def _make_tier(self, at: int, tier: dict[str, Any], rows: Rows) -> Any:
        """Makes a tier that finds only what was stored with rows of the same namespace."""
        config, told = self.config, copy.copy(self)
        namespace = hashlib.sha256(rows.namespace.encode()).hexdigest()[:32]
        dtype = f"{config.model.dtype}, torch_kvswap {namespace}"
        told.config = replace(
            config,
            model=replace(config.model, dtype=dtype),
            # If rows are, vLLM leaves the parallel sizes out of their names.
            parallel=replace(config.parallel, is_parallelism_agnostic=self._is_canonical),
        )
        try:
            made = SecondaryTierFactory.create_secondary_tier(tier, rows.memory, told)
        except Exception as error:
            raise ValueError(
                f"kv_connector_extra_config: secondary_tiers[{at}] of type {tier['type']!r} cannot "
                f"be made: {error}"
            ) from error
        told_as = at, tier["type"], dtype, rows.namespace
        _log.info("secondary tier %d (%s) finds only rows that were stored as %s: %s", *told_as)
        return made
