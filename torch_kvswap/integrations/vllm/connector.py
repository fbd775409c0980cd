"""The connector that vLLM is configured with. It makes the spec itself.

vLLM's OffloadingConnector decides what is stored and loaded. KVSwapConnector adds two things:

- A failed transfer does not end the engine. The worker part reports its blocks and pages, and the
  scheduler part forgets the chunks on these pages before it looks up others.
- In-step loads: a request with enough tokens to compute is loaded in the step that computes them.
  The model's stream waits for the blocks of each layer right before that layer. The in-step loads
  of one step are one job, so that the first layers of all requests land before the last layers of
  any.
  They are safe only under vLLM's policy "fail". Under "recompute" vLLM drops a token that was
  computed from a failed load only if no later step has been scheduled; its runner V2 keeps counting
  from that token; and requests that share the blocks continue before the blocks are recomputed. A
  child of a MultiConnector does not know the engine's policy and makes no in-step loads.
"""

from __future__ import annotations

import importlib.metadata
import logging
import sys
from collections import Counter
from collections.abc import Iterable
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any

from vllm.config import CUDAGraphMode
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
    TransferJob,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    OffloadingConnectorScheduler,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import OffloadingConnectorWorker
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec
from vllm.v1.kv_offload.base import GPULoadStoreSpec
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from torch_kvswap.integrations import TESTED, is_tested
from torch_kvswap.integrations.vllm.identity import describe_engine
from torch_kvswap.integrations.vllm.scheduler_side import FAILURES, HostManager
from torch_kvswap.integrations.vllm.spec import KVSwapOffloadingSpec
from torch_kvswap.integrations.vllm.tiering import KVSwapTieringSpec
from torch_kvswap.integrations.vllm.vllm_logging import write_where_vllm_does
from torch_kvswap.integrations.vllm.worker import Failure, KVSwapWorker
from torch_kvswap.offload.handler import Job

_log = logging.getLogger(__name__)
# Loading 16 tokens takes about as long as computing one. While other requests run, a request may
# load at most 16 tokens in its step for each token that it computes. A step never loads more than
# 16 tokens for each token of vLLM's largest step.
_LOADED_PER_COMPUTED = 16


@dataclass
class KVSwapWorkerMetadata(OffloadingWorkerMetadata):
    """What the workers report to the scheduler.

    Attributes:
        failures (list[Failure]): of the jobs that they report.
        has_failed_step (bool): a load of the step itself has failed.
    """

    failures: list[Failure] = field(default_factory=list)
    has_failed_step: bool = False

    def aggregate(self, other: Any) -> KVSwapWorkerMetadata:
        """The reports of several workers as one."""
        both = super().aggregate(other)
        failures = [*self.failures, *other.failures]
        has_failed_step = self.has_failed_step or other.has_failed_step
        return KVSwapWorkerMetadata(
            both.completed_jobs, both.transfer_stats, failures, has_failed_step
        )


class WorkerPart(OffloadingConnectorWorker):
    """Reports what failed: pages to the scheduler part, blocks or requests to vLLM. Makes the
    model's stream wait for in-step loads. The spec makes the worker, ours or vLLM's own.

    Attributes:
        failed_blocks (set[int]): GPU blocks that in-step loads have not loaded.
        failed_requests (set[str]): requests whose other loads have failed.
    """

    def __init__(
        self,
        spec: KVSwapOffloadingSpec | KVSwapTieringSpec,
        vllm_config: Any,
        kv_cache_config: Any,
    ) -> None:
        super().__init__(spec, vllm_config, kv_cache_config)
        self._overwrites_before_flush = _overwrites_before_flush(vllm_config, kv_cache_config)
        self._open: dict[int, TransferJob] = {}  # that the scheduler takes for running
        self._deferred: dict[int, TransferJob] = {}  # stores that begin in the next step
        self._has_failed_step = False  # a load of the last step has failed
        self._failures: list[Failure] = []  # that the scheduler has not heard of
        self.failed_blocks: set[int] = set()
        self.failed_requests: set[str] = set()
        self._step_job: Job | None = None  # does the loads of this step

    @property
    def _ours(self) -> KVSwapWorker | None:
        """The worker, unless vLLM's own moves the blocks."""
        return self.worker if isinstance(self.worker, KVSwapWorker) else None

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        """As vLLM's, which calls it before everything else in a step: begins the stores of the step
        before, and waits for those whose blocks have a new owner.

        After a failed in-step load it drops all of these stores, and those of this step, which may
        have been scheduled before. With `_overwrites_before_flush` the new owner has written to its
        blocks already: stores of their old contents are dropped.
        """
        metadata = kv_connector_metadata
        self._open |= metadata.load_jobs | metadata.store_jobs
        if self._overwrites_before_flush:
            self._drop_stores(metadata, metadata.jobs_to_flush)
        self._begin_deferred(metadata)

    def start_kv_transfers(self, metadata: Any) -> None:
        """As vLLM's, but the host does not wait for in-step loads."""
        if self._ours:
            self._ours.gather_step_loads()
        super().start_kv_transfers(metadata)
        self._step_job = self._ours.begin_step_loads() if self._ours else None

    def prepare_store_kv(self, metadata: Any) -> None:
        """As vLLM's: the stores of a step begin in the next one. Until then they can be dropped."""
        self._deferred |= metadata.store_jobs

    def wait_for_layer(self, name: str | None) -> None:
        """Makes the current stream wait until this layer is loaded; None: all layers. Failures of
        in-step loads are reported by get_finished()."""
        if self._step_job is None or self._ours is None:
            return
        group = self._ours.layer_groups.get(name)
        self._step_job.wait(layer_group=group)
        if group is None:
            self._step_job = None

    def end_transfers(self) -> None:
        """Begins the stores of the last step, and blocks the host until no transfer runs."""
        # No new owner has written to their blocks, so that none is dropped for it.
        self._begin_deferred(OffloadingConnectorMetadata({}, {}, jobs_to_flush=set(self._open)))

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        """As vLLM's; requests whose loads failed count as received, too. Blocks the host until the
        in-step loads have ended: vLLM must hear of their failures with the step's tokens."""
        if in_step := {number for number, job in self._open.items() if job.sync}:
            self.worker.wait(in_step)
        self._step_job = None
        finished: tuple[set[str], set[str]] = super().get_finished(finished_req_ids)
        failures = self._ours.take_failures() if self._ours else []
        self._failures += failures
        for failure in failures:
            if failure.number in in_step:
                self.failed_blocks |= failure.blocks
                self._has_failed_step = True
            elif failure.direction == "load":
                self.failed_requests.add(self._open[failure.number].req_id)
        if self._overwrites_before_flush and self._ours:
            self._ours.hold_stream()
        elif self._overwrites_before_flush:
            stores = {
                n for n, job in self._open.items() if isinstance(job.src_spec, GPULoadStoreSpec)
            }
            self.worker.wait(stores)
        return finished

    def _begin_deferred(self, metadata: Any) -> None:
        """Begins the stores of the step before, or drops them after a failed in-step load. Blocks
        the host until the jobs_to_flush have ended."""
        if self._has_failed_step:
            self._drop_stores(metadata, self._open)
            self._has_failed_step = False
        deferred, self._deferred = self._deferred, {}
        super().prepare_store_kv(replace(metadata, store_jobs=deferred))
        super().handle_preemptions(metadata)

    def _drop_stores(self, metadata: Any, numbers: Iterable[int]) -> None:
        """Drops those of these stores that have not begun."""
        for jobs in (self._deferred, metadata.store_jobs):
            for number in jobs.keys() & numbers:
                pages = set(map(int, jobs.pop(number).dst_spec.block_ids))
                self._failures.append(Failure(number, "store", "dropped", set(), pages))

    def build_connector_worker_meta(self) -> KVSwapWorkerMetadata | None:
        """As vLLM's, with the stores that were dropped, and the failures of the jobs."""
        meta = super().build_connector_worker_meta() or OffloadingWorkerMetadata()
        for failure in self._failures:
            if failure.reason == "dropped":
                meta.mark_completed(failure.number)
        if not meta.completed_jobs:
            return None
        for number in meta.completed_jobs:
            del self._open[number]
        failures, self._failures = self._failures, []
        return KVSwapWorkerMetadata(
            meta.completed_jobs, meta.transfer_stats, failures, self._has_failed_step
        )


class SchedulerPart(OffloadingConnectorScheduler):
    """Forgets chunks that could not be stored or loaded, and chooses in-step loads.

    Args:
        spec (KVSwapOffloadingSpec | KVSwapTieringSpec): makes the manager, ours or that of vLLM's
            tiers.
        vllm_config (VllmConfig): vLLM's configuration.
        kv_cache_config (KVCacheConfig): the groups of layers.
        loads_in_step (bool): in-step loads are possible.
    """

    def __init__(
        self,
        spec: KVSwapOffloadingSpec | KVSwapTieringSpec,
        vllm_config: Any,
        kv_cache_config: Any,
        loads_in_step: bool,
    ) -> None:
        self.config: Any
        super().__init__(spec, vllm_config, kv_cache_config)
        self._loads_in_step = loads_in_step
        self._failed_keys: set[Any] = set()  # of stores that some worker has not ended yet
        is_ours = isinstance(self.manager, HostManager)
        if not is_ours:
            self._complete_store = self.manager.complete_store
            self.manager.complete_store = self._end_store
            # Looking for a part of a block, vLLM's tiers evict the whole ones that it has found.
            if self.config.supports_partial_tail:
                _log.info("the host and its secondary_tiers keep whole blocks only")
                self.config = self.config._replace(supports_partial_tail=False)
        windows = [group.sliding_window_size_in_chunks for group in self.config.kv_group_configs]
        self._has_one_source = is_ours and windows == [None]
        self._failures = Counter[tuple[str, str]]()  # since get_stats()
        self._running: set[str] = set()  # requests of the last step that have not ended
        most_computed: int = vllm_config.scheduler_config.max_num_batched_tokens
        self._most_loaded = _LOADED_PER_COMPUTED * most_computed
        self._loaded = 0  # tokens of in-step loads in this step
        # Requests with a failed load, and how often they had been preempted by then.
        self._failed_loads: dict[str, int] = {}
        # Requests that have not started again since a reset, and how many tokens they may store.
        self._stopped_stores: dict[str, int | None] = {}
        self._gpu_blocks = range(kv_cache_config.num_blocks)
        self.kv_cache_manager: Any = None

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int, **options: Any
    ) -> tuple[int | None, bool]:
        """As vLLM's. Loads in the step if no other request is running, or if this one has enough
        tokens to compute.

        A request whose load has failed loads nothing more, and waits for no tier, until it is
        preempted. vLLM still reserves the blocks of the failed load and would reserve as many again
        for another one. If the GPU has too few, it would schedule nothing any more.
        """
        name = request.request_id
        if name in self._stopped_stores:
            self._req_status[name].max_offload_tokens = self._stopped_stores.pop(name)
        has_failed = self._failed_loads.get(name) == request.num_preemptions
        most = 0
        # In-step loads are joined page by page, and the step must not write to a loaded block.
        tokens_per_chunk = self.config.kv_group_configs[0].tokens_per_chunk
        if self._loads_in_step and not has_failed and num_computed_tokens % tokens_per_chunk == 0:
            most = self._most_loaded
            if self._running:
                missing = request.num_tokens - num_computed_tokens
                of_request = missing * _LOADED_PER_COMPUTED // (_LOADED_PER_COMPUTED + 1)
                most = min(most, self._loaded + of_request)
        most *= self.config.kv_bytes_per_token
        self.config = self.config._replace(sync_load_budget_bytes=most)
        hit, is_async = super().get_num_new_matched_tokens(request, num_computed_tokens, **options)
        if hit != 0 and has_failed:
            return 0, False
        if hit and not is_async:
            self._loaded += hit
        return hit, is_async

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> Any:
        """As vLLM's, which takes microseconds for each block of a load."""
        if self._has_one_source and num_external_tokens:
            return {CacheHitSource.HOST: num_external_tokens}
        return super().get_external_cache_hit_sources(request, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        """As vLLM's. Where prefixes end inside blocks of states, vLLM stores the end of a prompt,
        too: it takes max_offload_tokens of 0 for no limit there, and fails at a limit before it."""
        states = scheduler_output.kv_connector_block_state
        if states is not None and states.boundary_state_offloads:
            limits = {name: one.max_offload_tokens for name, one in self._req_status.items()}
            stored = {
                name: [one for one in ends if limits.get(name) is None or one[2] <= limits[name]]
                for name, ends in states.boundary_state_offloads.items()
            }
            states = replace(states, boundary_state_offloads=stored)
            scheduler_output = replace(scheduler_output, kv_connector_block_state=states)
        meta = super().build_connector_meta(scheduler_output)
        self._running = set(scheduler_output.num_scheduled_tokens)
        self._loaded = 0
        return meta

    def update_connector_output(self, connector_output: Any) -> None:
        """As vLLM's, which takes every ended job for a success."""
        meta = connector_output.kv_connector_worker_meta
        for failure in meta.failures if meta is not None else ():
            self._failures[failure.direction, failure.reason] += 1
            job = self._jobs.get(failure.number)
            if job is None:  # the cache was reset while it ran
                continue
            if isinstance(self.manager, HostManager):
                self.manager.fail_pages(failure.pages, failure.reason)
            elif job.is_store:
                self._failed_keys |= job.keys
            status = self._req_status[job.req_id]
            if not job.is_store and not status.req.is_finished():
                self._failed_loads[job.req_id] = status.req.num_preemptions
        if meta is not None and meta.has_failed_step:
            self._forget_computed()
        super().update_connector_output(connector_output)

    def get_stats(self) -> OffloadingConnectorStats | None:
        """As vLLM's, with the jobs that have failed."""
        stats: OffloadingConnectorStats | None = super().get_stats()
        while self._failures:
            labels, jobs = self._failures.popitem()
            stats = stats or OffloadingConnectorStats()
            stats.increase_counter(FAILURES, jobs, labels)
        return stats

    def _end_store(self, keys: Any, req_context: Any, success: bool = True) -> None:
        """complete_store() of vLLM's tiers. A store fails if any worker could not copy it."""
        has_failed = not self._failed_keys.isdisjoint(keys)
        self._failed_keys.difference_update(keys)
        self._complete_store(keys, req_context, success and not has_failed)

    def reset_cache(self) -> None:
        """As vLLM's, but requests store nothing until they start again. vLLM would offer the chunks
        of running requests from the first one on, although blocks that have left a sliding window
        were given to other requests."""
        super().reset_cache()
        self._failed_keys.clear()
        for name, status in self._req_status.items():
            self._stopped_stores.setdefault(name, status.max_offload_tokens)
            status.max_offload_tokens = 0

    def _forget_computed(self) -> None:
        """Forgets what may have been computed from a failed in-step load: all that the prefix cache
        of the GPU has, and what ended requests have not stored yet.

        vLLM has ended the requests with the load's blocks. Requests that were preempted or aborted
        meanwhile have left such blocks in the prefix cache.
        """
        self.kv_cache_manager.evict_blocks(set(self._gpu_blocks))
        for status in self._req_status.values():
            for state in status.group_states if status.req.is_finished() else ():
                state.offload_keys.clear()
                state.block_ids.clear()

    def request_finished(self, request: Any) -> Any:
        """As vLLM's."""
        self._running.discard(request.request_id)
        self._failed_loads.pop(request.request_id, None)
        self._stopped_stores.pop(request.request_id, None)
        return super().request_finished(request)


class KVSwapConnector(OffloadingConnector):
    """vLLM's OffloadingConnector with our copies and block manager. It survives failed copies.

    Args:
        vllm_config (VllmConfig): its kv_connector_extra_config has the SpecOptions: see
            docs/vllm.md.
        role (KVConnectorRole): whether to make the scheduler's part or a worker's.
        kv_cache_config (KVCacheConfig): the groups of layers.

    Raises:
        ValueError: an option is unknown, missing or invalid.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        write_where_vllm_does()
        KVConnectorBase_V1.__init__(self, vllm_config, role, kv_cache_config)
        self._is_layer_by_layer = vllm_config.speculative_config is None
        config = build_offloading_config(vllm_config, kv_cache_config)
        spec: KVSwapTieringSpec | KVSwapOffloadingSpec
        if config.extra_config.get("secondary_tiers"):
            spec = KVSwapTieringSpec(config)
        else:
            has_server = config.extra_config.get("host_server") is not None
            engine = describe_engine(vllm_config) if has_server else None
            spec = KVSwapOffloadingSpec(config, engine)
        self.connector_scheduler: Any = None
        self.connector_worker: Any = None
        if role == KVConnectorRole.SCHEDULER:
            of_factory = KVConnectorFactory.create_connector.__func__.__code__
            is_vllms_child = sys._getframe(1).f_code is of_factory
            why_before = _why_before_step(vllm_config, kv_cache_config, is_vllms_child)
            _say_how(
                vllm_config, why_before, _overwrites_before_flush(vllm_config, kv_cache_config)
            )
            self.connector_scheduler = SchedulerPart(
                *(spec, vllm_config, kv_cache_config), loads_in_step=not why_before
            )
        else:
            self.connector_worker = WorkerPart(spec, vllm_config, kv_cache_config)

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        """As vLLM's. Also for the scheduler part."""
        super().bind_kv_cache_manager(kv_cache_manager)
        self.connector_scheduler.kv_cache_manager = kv_cache_manager

    def unregister_kv_caches(self) -> None:
        """Ends all transfers, because vLLM now frees the memory of the cache, to sleep. When it
        wakes up it maps new memory at the same addresses."""
        self.connector_worker.end_transfers()

    def start_load_kv(self, forward_context: Any, **options: Any) -> None:
        """As vLLM's. Where no Python runs before each layer, the step waits for the whole loads."""
        super().start_load_kv(forward_context, **options)
        # None, or a full graph: a replay. A list: micro-batches, each on a stream of its own.
        has_hooks = (
            isinstance(forward_context.attn_metadata, dict)
            and forward_context.cudagraph_runtime_mode != CUDAGraphMode.FULL
        )
        if not has_hooks or not self._is_layer_by_layer:
            self.connector_worker.wait_for_layer(None)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Makes the current stream wait until this layer is loaded."""
        self.connector_worker.wait_for_layer(layer_name)

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """As vLLM's, with the requests whose loads have failed."""
        results = super().get_transfer_results(finished_req_ids)
        failed, self.connector_worker.failed_requests = self.connector_worker.failed_requests, set()
        results.failed_recving |= failed
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        """The GPU blocks that this step reports as not loaded."""
        failed, self.connector_worker.failed_blocks = self.connector_worker.failed_blocks, set()
        return set(failed)

    @classmethod
    def build_prom_metrics(cls, vllm_config: Any, *others: Any) -> Any:
        """As vLLM's, which finds the metrics of our spec by its name in the configuration."""
        transfer, vllm_config = copy(vllm_config.kv_transfer_config), copy(vllm_config)
        vllm_config.kv_transfer_config = transfer
        transfer.kv_connector_extra_config = {
            **transfer.kv_connector_extra_config,
            "spec_name": KVSwapOffloadingSpec.__name__,
            "spec_module_path": KVSwapOffloadingSpec.__module__,
        }
        return super().build_prom_metrics(vllm_config, *others)


def _say_how(vllm_config: Any, why_before: str, writes_first: bool) -> None:
    """Says once, in vLLM's log, what the configuration leaves open."""
    how = "layer by layer in the step that computes the rest, if enough is left to compute"
    if why_before:
        how = f"before the step that computes the rest, because {why_before}"
    elif why_whole := _why_whole(vllm_config):
        how = f"in the step that computes the rest, which waits for all layers, because {why_whole}"
    said = [f"KVSwapConnector loads prompts {how}"]
    if writes_first:
        said.append(
            "vLLM's runner V2 writes to new blocks of this model before stores of their old "
            "contents can end, so that each step waits for the stores that run beside it, and a "
            "store that has not begun when its blocks are given out again is dropped"
        )
    _log.info("%s", "; ".join(said))
    version = importlib.metadata.version("vllm")
    if not is_tested("vllm", version):
        _log.warning("KVSwapConnector was tested with vLLM %s, this is %s", TESTED["vllm"], version)


def _why_before_step(vllm_config: Any, kv_cache_config: Any, is_vllms_child: bool) -> str:
    """Why no load is safe in the step that computes the rest; empty if loads are.

    Args:
        vllm_config (VllmConfig): that of the connector.
        kv_cache_config (KVCacheConfig): the groups of layers.
        is_vllms_child (bool): vLLM's factory makes the connector, and passes the configuration that
            the engine follows; MultiConnector, for example, passes one of its own.
    """
    policy = vllm_config.kv_transfer_config.kv_load_failure_policy
    stages = vllm_config.parallel_config.pipeline_parallel_size
    if not is_vllms_child:
        return (
            "another connector has made it, which does not tell it the kv_load_failure_policy that "
            "the engine follows"
        )
    if policy != "fail":
        return f"kv_load_failure_policy is {policy!r}"
    # With several groups vLLM cannot tell whose block it is that was not loaded, and with a sliding
    # window it cannot compute again from there.
    kinds = [type(group.kv_cache_spec) for group in kv_cache_config.kv_cache_groups]
    if kinds not in ([FullAttentionSpec], [MLAAttentionSpec]):
        return "the model has several groups of layers, a sliding window or states"
    return "" if stages == 1 else f"pipeline_parallel_size is {stages}"


def _why_whole(vllm_config: Any) -> str:
    """Why steps wait for all layers of their loads before the first layer; empty if they do not."""
    if vllm_config.speculative_config is not None:
        return "decoding is speculative"
    if vllm_config.parallel_config.use_ubatching:
        return "steps are divided into micro-batches"
    mode = vllm_config.compilation_config.cudagraph_mode
    return "cudagraph_mode is FULL" if mode and mode.mixed_mode() == CUDAGraphMode.FULL else ""


def _overwrites_before_flush(vllm_config: Any, kv_cache_config: Any) -> bool:
    """Whether steps write to their new blocks (zeros, copies of other blocks) before they call
    handle_preemptions(), which waits for the stores of the old contents.

    vLLM's runner V2 does it for models with states, and for caches of several precisions.
    """
    return bool(kv_cache_config.needs_kv_cache_zeroing and vllm_config.use_v2_model_runner)
