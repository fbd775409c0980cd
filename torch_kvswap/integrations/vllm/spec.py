"""The spec that KVSwapConnector makes. It makes the manager and the workers."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from typing import Any

from vllm.distributed.parallel_state import get_node_count, get_pp_group, get_tp_group
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingManager,
    OffloadingSpec,
    OffloadingWorker,
)
from vllm.v1.kv_offload.config import OffloadingConfig
from vllm.v1.kv_offload.cpu.common import CPUOffloadingInfo
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from torch_kvswap.encoding.slot import read_encoding
from torch_kvswap.host_pool.system import NoRoomError, check_room
from torch_kvswap.integrations.vllm.options import read_options
from torch_kvswap.integrations.vllm.scheduler_session import SchedulerSession
from torch_kvswap.integrations.vllm.scheduler_side import FAILURES, PAGES, KVSwapManager
from torch_kvswap.integrations.vllm.served import ServedPool
from torch_kvswap.integrations.vllm.server_manager import SharedManager
from torch_kvswap.integrations.vllm.worker import KVSwapWorker
from torch_kvswap.integrations.vllm.worker_pools import replicated_pool

_log = logging.getLogger(__name__)


class KVSwapOffloadingSpec(OffloadingSpec):
    """vLLM's OffloadingSpec on torch_kvswap's handler and pages.

    There is one in the scheduler, which asks for the manager, and one in each worker. The class
    also declares the metrics, with and without tiers.

    Args:
        config (OffloadingConfig): vLLM's configuration; `extra_config` has the SpecOptions.
        engine (Mapping[str, Any] | None): describe_engine(), which `host_server` needs.

    Raises:
        ValueError: an option is unknown, missing or invalid. get_manager() and get_worker() say if
            there are too few bytes for a chunk.
    """

    def __init__(self, config: OffloadingConfig, engine: Mapping[str, Any] | None = None) -> None:
        super().__init__(config)
        self._engine = engine
        self.options = read_options(config.extra_config)
        # Several workers have equal caches. vLLM reads this: only rank 0 then stores.
        self.replicated_layout = bool(config.replicated_layout)
        self._check()
        copies = 1 if self.replicated_layout else config.parallel.world_size
        block = read_encoding(self.options.encoding).bytes_for(config.worker_kv_bytes_per_block)
        self._chunk_bytes = int(block * config.cache.blocks_per_chunk * copies)  # in all workers
        # Equal in the scheduler and in all workers with as many layers as the first one.
        self.num_pages = self.options.cpu_bytes_to_use // max(self._chunk_bytes, 1)

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        """Our metrics and those of vLLM's own spec for these options, by name."""
        return {
            **_vllms_spec(extra_config).build_metric_definitions(extra_config),
            FAILURES: OffloadingCounterMetadata(
                documentation="Stores and loads of a worker that did not copy all of their "
                "blocks: failed, rejected (a block does not fit into its encoded slot), damaged (a "
                "block is not what was stored) or dropped (not begun before its blocks changed).",
                labelnames=("direction", "reason"),
            ),
            PAGES: OffloadingGaugeMetadata(
                documentation="Pages of the host memory, each for a chunk, by state: free, used, "
                "or in_flight (being stored or loaded).",
                labelnames=("state",),
            ),
        }

    @classmethod
    def config_info_keys(cls, extra_config: dict[str, Any]) -> Any:
        """The labels of vllm:kv_offload_config_info."""
        return _vllms_spec(extra_config).config_info_keys(extra_config)

    def get_manager(self) -> OffloadingManager:
        """Makes the manager."""
        options = self.options
        if options.host_server is None:
            num_pages = self._check_size(self.num_pages, self._chunk_bytes)
            events = self.kv_events_config.enable_kv_cache_events
            how = options.eviction_policy, options.store_threshold, events
            return KVSwapManager(num_pages, *how, self._info(num_pages))
        names = self.config.engine_id, self.config.parallel.world_size
        session = SchedulerSession(options.host_server, *names)
        try:
            session.join()
        except OSError as error:  # a worker has logged it
            _log.debug("%s", error)
        session.start()
        return SharedManager(session, self._info(session.num_pages))

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """Makes the worker."""
        parallel, path = self.config.parallel, self.options.host_server
        how: dict[str, Any] = {}
        if path is not None:
            assert self._engine is not None
            serve = partial(ServedPool, path, self.config, self._engine)
            how = {"serve": serve, "has_writers": True}
        elif self.replicated_layout:
            how = {"make_pool": partial(replicated_pool, group=get_tp_group())}
            if self.options.exchange:
                how["exchange"] = parallel.rank, parallel.world_size
        sizes = self.num_pages, self._chunk_bytes
        if parallel.pp_size > 1:
            # Stages can have different numbers of layers and thus of pages; the scheduler knows the
            # first stage's. The group of all workers exists only if they are on several nodes.
            sizes = get_pp_group().broadcast_object(sizes, src=0)
        num_pages = 0 if path is not None else self._check_size(*sizes)
        layers = [group.layer_names for group in self.config.groups]
        try:
            if num_pages and not self.replicated_layout:
                self._check_room(num_pages)
            return KVSwapWorker(
                *(kv_caches, num_pages, self.blocks_per_chunk, self.options, layers), **how
            )
        except NoRoomError as error:
            fits = error.room // self._chunk_bytes * self._chunk_bytes
            smaller = f"set it to {fits} or less, or " if fits > 0 else ""
            raise ValueError(
                f"kv_connector_extra_config: cpu_bytes_to_use is {self.options.cpu_bytes_to_use}, "
                f"but {error.problem}; {smaller}{error.otherwise}"
            ) from error

    def _check(self) -> None:
        """Raises ValueError if an option does not fit the model or other options."""
        config, options = self.config, self.options
        parallel, blocks = config.parallel, config.cache.blocks_per_chunk
        dtype = str(config.model.dtype).removeprefix("torch.")
        why = ""
        # vLLM frees blocks that have left a sliding window, and states that were replaced, one by
        # one. It then stores what is left of a chunk, and does not say which blocks are missing.
        windows = [one.sliding_window_size_in_chunks for one in config.groups]
        if blocks > 1 and windows.count(None) < len(windows):
            why = (
                f"blocks_per_chunk or block_size asks for chunks of {blocks} blocks, but this "
                "model has sliding windows or Mamba states, and vLLM may store a part of their "
                "chunks; leave these options out"
            )
        elif options.encoding != "raw" and dtype != "bfloat16":
            why = (
                f"encoding is {options.encoding!r}, which is for bfloat16, but the KV cache is of "
                f"{dtype}; leave encoding out"
            )
        elif options.encoding != "raw" and self.replicated_layout:
            why = (
                f"encoding is {options.encoding!r}, but the {parallel.world_size} workers have the "
                "same cache and share raw pages; leave encoding out"
            )
        elif options.exchange and not self.replicated_layout:
            why = (
                "exchange is true, but only the workers of a model with latent attention (MLA), "
                "tensor parallelism and vLLM's executor mp on one machine have equal caches; leave "
                "exchange out"
            )
        elif options.host_server and parallel.pp_size * parallel.pcp_size * parallel.dcp_size > 1:
            why = (
                f"host_server is {options.host_server!r}, but pipeline_parallel_size is "
                f"{parallel.pp_size}, prefill_context_parallel_size {parallel.pcp_size} and "
                f"decode_context_parallel_size {parallel.dcp_size}, which must be 1 there; set "
                "cpu_bytes_to_use instead"
            )
        elif options.host_server and self._engine is None:
            why = (
                f"host_server is {options.host_server!r}, which only KVSwapConnector can use; set "
                "kv_connector to it"
            )
        if why:
            raise ValueError(f"kv_connector_extra_config: {why}")

    def _check_size(self, num_pages: int, chunk_bytes: int) -> int:
        """The number of pages that the scheduler knows.

        Raises:
            ValueError: there is none.
        """
        if chunk_bytes == 0:
            raise ValueError("this model has no KV cache to offload; leave out kv_transfer_config")
        if num_pages == 0:
            raise ValueError(
                f"cpu_bytes_to_use is {self.options.cpu_bytes_to_use}, but one chunk of "
                f"{self.blocks_per_chunk} blocks takes {chunk_bytes} bytes in all workers together"
            )
        return num_pages

    def _check_room(self, num_pages: int) -> None:
        """Raises NoRoomError if the machine has no room for the pools of all tensor-parallel ranks.

        Alone, each would count on the same memory. Rank 0 checks before any of them takes its part;
        if it fails, vLLM ends the others. Ranks of several machines are not checked together.
        """
        parallel = self.config.parallel
        if parallel.tp_size == 1 or get_node_count() > 1:
            return
        group, ranks = get_tp_group(), parallel.world_size // parallel.tp_size
        if group.rank_in_group == 0:
            check_room(num_pages * self._chunk_bytes // ranks, self._chunk_bytes)
        group.barrier()

    def _info(self, num_pages: int) -> Any:
        """What config_info() reports."""
        sizes = num_pages, self._chunk_bytes
        return CPUOffloadingInfo.from_config(self.config, *sizes).as_config_info()


def _vllms_spec(options: Mapping[str, Any]) -> Any:
    """vLLM's own spec for these options."""
    return TieringOffloadingSpec if options.get("secondary_tiers") else CPUOffloadingSpec
