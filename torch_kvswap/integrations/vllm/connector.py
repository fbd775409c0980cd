"""The connector that vLLM is configured with. It makes the spec by itself, and survives failures.

vLLM's OffloadingConnector decides what is stored and loaded, and when. What KVSwapConnector adds:
a transfer that fails ends no engine. The worker part names its blocks and pages, and the scheduler
part forgets the chunks on these pages before it looks up others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1 import base as connector_base
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    OffloadingConnectorScheduler,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import OffloadingConnectorWorker
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec

from torch_kvswap.integrations.vllm.spec import KVSwapOffloadingSpec

_SPEC = {
    "spec_name": "KVSwapOffloadingSpec",
    "spec_module_path": "torch_kvswap.integrations.vllm",
}
# Since 0.33 a worker can name requests whose loads failed.
_NAMES_REQUESTS = hasattr(connector_base, "KVConnectorTransferResults")


@dataclass
class KVSwapWorkerMetadata(OffloadingWorkerMetadata):
    """What the workers report to the scheduler.

    Attributes:
        failed_pages (dict[int, set[int]]): host pages that jobs have not written or not read, by
            vLLM's number of the job.
    """

    failed_pages: dict[int, set[int]] = field(default_factory=dict)

    def aggregate(self, other: Any) -> KVSwapWorkerMetadata:
        """The reports of several workers as one."""
        both = super().aggregate(other)
        failed = {number: set(pages) for number, pages in self.failed_pages.items()}
        for number, pages in other.failed_pages.items():
            failed.setdefault(number, set()).update(pages)
        return KVSwapWorkerMetadata(both.completed_jobs, both.transfer_stats, failed)


class WorkerPart(OffloadingConnectorWorker):
    """Reports what failed: pages to the scheduler part, blocks or requests to vLLM.

    Args:
        spec (KVSwapOffloadingSpec): makes the worker, which does not repeat what fails.
        others: further arguments of vLLM's OffloadingConnectorWorker.
        names_blocks (bool): vLLM can compute single blocks again.
    """

    def __init__(self, spec: KVSwapOffloadingSpec, *others: Any, names_blocks: bool) -> None:
        super().__init__(spec, *others)
        self._names_blocks = names_blocks
        self._failed_pages: dict[int, set[int]] = {}
        self._failed_blocks: set[int] = set()
        self._failed_requests: set[str] = set()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        """As vLLM's. The requests of failed loads are among those received."""
        requests = dict(self._load_jobs)
        finished: tuple[set[str], set[str]] = super().get_finished(finished_req_ids)
        for number, failure in self.worker.take_failures().items():
            self._failed_pages[number] = failure.pages
            if number not in requests:
                continue
            if self._names_blocks:
                self._failed_blocks |= failure.blocks
            else:
                self._failed_requests.add(requests[number])
        return finished

    def take_failed_blocks(self) -> set[int]:
        """GPU blocks that were not loaded, of the loads reported since the last call."""
        taken, self._failed_blocks = self._failed_blocks, set()
        return taken

    def take_failed_requests(self) -> set[str]:
        """Requests whose loads have failed since the last call, if vLLM takes no blocks."""
        taken, self._failed_requests = self._failed_requests, set()
        return taken

    def build_connector_worker_meta(self) -> KVSwapWorkerMetadata | None:
        """As vLLM's, with the failures of the jobs that it reports."""
        meta = super().build_connector_worker_meta()
        if meta is None:
            return None
        failed, self._failed_pages = self._failed_pages, {}
        return KVSwapWorkerMetadata(meta.completed_jobs, meta.transfer_stats, failed)


class SchedulerPart(OffloadingConnectorScheduler):
    """Forgets the chunks that were not stored, or could not be loaded."""

    def update_connector_output(self, connector_output: Any) -> None:
        """As vLLM's, which takes every job that has ended for a success."""
        meta = connector_output.kv_connector_worker_meta
        failed: Mapping[int, set[int]] = meta.failed_pages if meta is not None else {}
        for number, pages in failed.items():
            job = self._jobs.get(number)
            if job is None:  # it was running when the cache was reset
                continue
            self.manager.fail_pages(pages)
            if not job.is_store:
                # vLLM counts loaded chunks as stored. What is computed again is offered again.
                for state in self._req_status[job.req_id].group_states:
                    state.next_stored_chunk_idx = 0
        super().update_connector_output(connector_output)

    def request_finished(self, request: Any) -> Any:
        """As vLLM's. 0.26 would offer chunks of a request that was aborted while it loaded, although
        it has not told their blocks, and end the engine."""
        finished = super().request_finished(request)
        status = self._req_status.get(request.request_id)
        for state in status.group_states if status is not None and not _NAMES_REQUESTS else ():
            del state.offload_keys[len(state.block_ids) // self.config.blocks_per_chunk :]
        return finished


class KVSwapConnector(OffloadingConnector):
    """vLLM's OffloadingConnector with KVSwapOffloadingSpec and failures that end no engine.

    Args:
        vllm_config (VllmConfig): kv_connector_extra_config has the SpecOptions.
        role (KVConnectorRole): which part to make, that of the scheduler or of a worker.
        kv_cache_config (KVCacheConfig): the groups of layers.

    Raises:
        ValueError: an option is unknown, missing or invalid.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        _choose_spec(vllm_config)
        KVConnectorBase_V1.__init__(self, vllm_config, role, kv_cache_config)
        names_blocks = _can_name_blocks(kv_cache_config)
        spec = KVSwapOffloadingSpec(
            build_offloading_config(vllm_config, kv_cache_config),
            repeats=not (names_blocks or _NAMES_REQUESTS),
        )
        self.connector_scheduler: SchedulerPart | None = None
        self.connector_worker: WorkerPart | None = None
        if role == KVConnectorRole.SCHEDULER:
            self.connector_scheduler = SchedulerPart(spec, vllm_config, kv_cache_config)
        else:
            of_engine = (vllm_config,) if _NAMES_REQUESTS else ()
            self.connector_worker = WorkerPart(
                spec, *of_engine, kv_cache_config, names_blocks=names_blocks
            )

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """As vLLM's (since 0.33), with the requests whose loads have failed."""
        results = super().get_transfer_results(finished_req_ids)
        results.failed_recving |= self.connector_worker.take_failed_requests()
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        """The GPU blocks that this step reports as not loaded."""
        return self.connector_worker.take_failed_blocks()

    @classmethod
    def build_prom_metrics(cls, vllm_config: Any, *others: Any) -> Any:
        """As vLLM's. It runs in the front end, where no connector is made."""
        _choose_spec(vllm_config)
        return super().build_prom_metrics(vllm_config, *others)


def _choose_spec(vllm_config: Any) -> None:
    """Names our spec in the configuration, from which vLLM's own code makes it for the metrics.

    Raises:
        ValueError: the configuration names another one.
    """
    options = vllm_config.kv_transfer_config.kv_connector_extra_config
    for name, ours in _SPEC.items():
        if options.setdefault(name, ours) != ours:
            raise ValueError(
                f"kv_connector_extra_config: {name} is {options[name]!r}, but KVSwapConnector makes "
                'its own spec; leave it out, or use "kv_connector": "OffloadingConnector"'
            )


def _can_name_blocks(kv_cache_config: Any) -> bool:
    """Whether vLLM can compute again from any block on: with several groups it cannot tell whose
    block it is, and with a sliding window the blocks in front may be gone."""
    groups = kv_cache_config.kv_cache_groups
    return len(groups) == 1 and type(groups[0].kv_cache_spec) in (FullAttentionSpec, MLAAttentionSpec)
