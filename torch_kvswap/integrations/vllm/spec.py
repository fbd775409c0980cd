"""The spec that KVSwapConnector makes. It makes the manager and the workers."""

from __future__ import annotations

import importlib.metadata
import logging
import os
from collections.abc import Sequence
from typing import Any

import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    OffloadingManager,
    OffloadingSpec,
    OffloadingWorker,
)
from vllm.v1.kv_offload.config import OffloadingConfig

from torch_kvswap.encoding.slot import read_encoding
from torch_kvswap.host_pool.shape import padded_slot
from torch_kvswap.host_pool.system import NoRoomError
from torch_kvswap.integrations.vllm.log import write_where_vllm_does
from torch_kvswap.integrations.vllm.options import (
    SERVER,
    TESTED_VERSIONS,
    SpecOptions,
    is_tested,
    read_options,
)
from torch_kvswap.integrations.vllm.pool import Host, Replicas, check_one_host, this_host
from torch_kvswap.integrations.vllm.rows import RowsOffer
from torch_kvswap.integrations.vllm.served import HostServer
from torch_kvswap.prefix.halves import SchedulerSession

_log = logging.getLogger(__name__)


class KVSwapOffloadingSpec(OffloadingSpec):
    """vLLM's OffloadingSpec on torch_kvswap's handler and pages.

    vLLM makes one in the scheduler, which asks for the manager, and one in each worker.

    Args:
        config (OffloadingConfig): vLLM's configuration; `extra_config` has the SpecOptions.

    Attributes:
        layers (Sequence[Sequence[str]] | None): names of the layers of each group, which the
            connector sets before it asks for the worker.

    Raises:
        ValueError: an option is unknown, missing or invalid. With a pipeline, get_manager() and
            get_worker() say if there are too few bytes for a chunk.
    """

    _row_alignment = 1  # bytes

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(config)
        write_where_vllm_does()
        self.options = self._read_options()
        # All workers have equal caches. vLLM reads this: only rank 0 then stores.
        self.replicated_layout = bool(config.replicated_layout)
        if self.options.encoding != "raw":
            _check_encoding(config, self.replicated_layout)
        copies = 1 if self.replicated_layout else config.parallel.world_size
        self.num_pages, self._chunk_bytes, self._problem = 0, 0, ""
        try:
            self._size_pools(copies)
        except ValueError as error:
            if config.parallel.pp_size == 1:
                raise
            # Only the first stage of a pipeline decides, and the others wait in get_worker().
            self._problem = str(error)
        _check_chunks(config)
        if self.options.host_server is not None:
            _check_shared(config, self.options)
        self._manager: OffloadingManager | None = None
        self._worker: OffloadingWorker | None = None
        self.layers: Sequence[Sequence[str]] | None = None
        version = importlib.metadata.version("vllm")
        if not is_tested(version):
            _log.warning(
                "KVSwapOffloadingSpec was tested with vLLM %s, this is %s",
                " and ".join(TESTED_VERSIONS),
                version,
            )

    def get_manager(self) -> OffloadingManager:
        """The manager, made at the first call."""
        if self._manager is None:
            if self._problem:
                raise ValueError(self._problem)
            self._manager = self._make_manager()
        return self._manager

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """The worker, made at the first call."""
        if self._worker is None:
            from torch_kvswap.integrations.vllm.worker import KVSwapWorker

            server = self._host_server()
            replicas = self._replicas() if server is None else None
            if replicas is not None:
                check_one_host(_hosts_of_workers(replicas))
            try:
                self._worker = KVSwapWorker(
                    *(kv_caches, self._pages_of_scheduler(), self.blocks_per_chunk),
                    *(self.options, replicas),
                    rows=self._rows_offer(),
                    server=server,
                    layers=self.layers,
                )
            except NoRoomError as error:
                chunk = max(self._chunk_bytes, 1)
                fits = error.room // chunk * chunk
                smaller = f"set it to {fits} or less, or " if fits > 0 else ""
                raise ValueError(
                    f"kv_connector_extra_config: cpu_bytes_to_use is "
                    f"{self.options.cpu_bytes_to_use}, but {error.problem}; "
                    f"{smaller}{error.otherwise}"
                ) from error
        return self._worker

    def _size_pools(self, copies: int) -> None:
        """Sets how many chunks fit into the bytes of all workers, and the bytes of one in all.

        Equal in the scheduler and in all workers with as many layers as the first one.

        Args:
            copies (int): number of workers that keep a chunk, or a part of it in aligned rows.

        Raises:
            ValueError: not a single chunk fits, or the model has no KV cache.
        """
        block, nbytes = self.config.worker_kv_bytes_per_block, self.options.cpu_bytes_to_use
        if block == 0:
            raise ValueError("this model has no KV cache to offload; leave out kv_transfer_config")
        encoding = read_encoding(self.options.encoding, self.options.bits_per_value)
        blocks = self.config.cache.blocks_per_chunk
        slot = encoding.bytes_for(block)
        parts = copies if self._row_alignment > 1 else 1
        chunk = padded_slot(slot, blocks, self._row_alignment, parts) * blocks * (copies // parts)
        if self.options.host_server is None and nbytes < chunk:
            raise ValueError(
                f"cpu_bytes_to_use is {nbytes}, but one chunk of {blocks} blocks takes {chunk} "
                "bytes in all workers together"
            )
        self.num_pages, self._chunk_bytes = int(nbytes // chunk), int(chunk)

    def _read_options(self) -> SpecOptions:
        return read_options(self.extra_config)

    def _host_server(self) -> HostServer | None:
        """The server that has the host memory."""
        if self.options.host_server is None:
            return None
        config = self.config
        bytes_of = {
            "vllm": importlib.metadata.version("vllm"),
            "cache_dtype": config.model.dtype,
            "kv_layout": config.kv_cache_layout,
            "PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED", ""),
        }
        path = self.options.host_server.removeprefix(SERVER)
        worker = self._among_workers(is_split=not self.replicated_layout)
        return HostServer(path, worker, config.model.name, bytes_of)

    def _rows_offer(self) -> RowsOffer | None:
        """What a worker offers to the scheduler, if that one needs the pages."""
        return None

    def _pages_of_scheduler(self) -> int:
        """The number of pages that the scheduler knows: that of the first worker.

        Only the stages of a pipeline can have different numbers of layers, and thus of pages.

        Raises:
            ValueError: the first stage has no room for a page, or no layers.
        """
        if self.config.parallel.pp_size == 1:
            return self.num_pages
        # The group of all workers of an engine exists only if they are on several nodes.
        from vllm.distributed.parallel_state import get_pp_group

        num_pages = int(get_pp_group().broadcast_object(self.num_pages, src=0))
        if num_pages == 0:
            raise ValueError(
                self._problem or "the first stage of the pipeline has no room for a chunk"
            )
        return num_pages

    def _replicas(self) -> Replicas | None:
        parallel = self.config.parallel
        is_split = self._row_alignment > 1 and not self.replicated_layout
        if not (self.replicated_layout or is_split) or parallel.world_size == 1:
            return None
        return self._among_workers(is_split)

    def _among_workers(self, is_split: bool) -> Replicas:
        """This worker. is_split: each worker has a part of each page."""
        rank, world = self.config.parallel.rank, self.config.parallel.world_size
        return Replicas(rank, world, self.config.engine_id, (rank, world) if is_split else None)

    def _make_manager(self) -> OffloadingManager:
        server = self._host_server()
        if server is not None:
            return self._make_shared_manager(server)
        from torch_kvswap.integrations.vllm.scheduler_side import KVSwapManager

        return KVSwapManager(*self._of_manager())

    def _make_shared_manager(self, server: HostServer) -> OffloadingManager:
        from torch_kvswap.integrations.vllm.shared import SharedManager

        session = SchedulerSession(server.path, server.worker.engine_id, server.worker.world)
        try:
            session.join()
        except OSError as error:  # a worker has told why
            _log.debug("%s", error)
        session.start()
        return SharedManager(session, self._info(session.num_pages))

    def _of_manager(self) -> tuple[Any, ...]:
        """The arguments of KVSwapManager."""
        options = self.options
        events = self.kv_events_config.enable_kv_cache_events
        policy = options.eviction_policy, options.store_threshold
        return self.num_pages, *policy, events, self._info(self.num_pages)

    def _info(self, num_pages: int) -> Any:
        """What config_info() reports."""
        from vllm.v1.kv_offload.cpu.common import CPUOffloadingInfo

        sizes = num_pages, self._chunk_bytes
        return CPUOffloadingInfo.from_config(self.config, *sizes).as_config_info()


def _hosts_of_workers(replicas: Replicas) -> list[Host]:
    """The hosts of all workers with the same cache, by rank. Each of them must call it."""
    from vllm.distributed.parallel_state import get_tp_group

    hosts: list[Any] = [None] * replicas.world
    torch.distributed.all_gather_object(hosts, this_host(), group=get_tp_group().cpu_group)
    return hosts


def _check_chunks(config: OffloadingConfig) -> None:
    """Raises ValueError if a chunk has several blocks, and vLLM may store a part of it.

    vLLM frees blocks that have left a sliding window, and states that were replaced, one by one. It
    then stores what is left of a chunk, without saying which blocks are missing.
    """
    blocks = config.cache.blocks_per_chunk
    is_whole = all(group.sliding_window_size_in_chunks is None for group in config.groups)
    if blocks > 1 and not is_whole:
        raise ValueError(
            f"kv_connector_extra_config asks for chunks of {blocks} blocks, but this model has "
            "sliding windows or Mamba states; vLLM may store a part of their chunks: leave out "
            "blocks_per_chunk and block_size"
        )


def _check_shared(config: OffloadingConfig, options: SpecOptions) -> None:
    """Raises ValueError if engines cannot share the pages of a server."""
    of = config.parallel
    if of.pp_size * of.pcp_size * of.dcp_size > 1:
        raise ValueError(
            f"kv_connector_extra_config: host_server is {options.host_server!r}, but "
            f"pipeline_parallel_size is {of.pp_size}, prefill_context_parallel_size {of.pcp_size} "
            f"and decode_context_parallel_size {of.dcp_size}, which must be 1 there; set "
            "cpu_bytes_to_use instead"
        )


def _check_encoding(config: OffloadingConfig, is_replicated: bool) -> None:
    """Raises ValueError if the cache is not bfloat16, or workers share their pages."""
    dtype = str(config.model.dtype).removeprefix("torch.")
    if dtype != "bfloat16":
        raise ValueError(
            f"kv_connector_extra_config: encoding is 'lossless', which is for bfloat16, but the KV "
            f"cache is of {dtype}; leave encoding out"
        )
    world = config.parallel.world_size
    if is_replicated and world > 1:
        raise ValueError(
            f"kv_connector_extra_config: encoding is 'lossless', but the {world} workers "
            "have the same cache and share raw pages; leave encoding out"
        )
