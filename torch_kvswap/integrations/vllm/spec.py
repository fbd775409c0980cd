"""The spec that KVSwapConnector makes. It makes the manager and the workers."""

from __future__ import annotations

import importlib.metadata
import logging
import os
from collections.abc import Sequence
from typing import Any

import torch
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    OffloadingManager,
    OffloadingSpec,
    OffloadingWorker,
)
from vllm.v1.kv_offload.config import OffloadingConfig
from vllm.v1.kv_offload.cpu.common import CPUOffloadingInfo

from torch_kvswap.encoding.slot import read_encoding
from torch_kvswap.host_pool.system import NoRoomError
from torch_kvswap.integrations.vllm.options import SERVER, read_options
from torch_kvswap.integrations.vllm.scheduler_side import KVSwapManager
from torch_kvswap.integrations.vllm.served import HostServer
from torch_kvswap.integrations.vllm.server_manager import SharedManager
from torch_kvswap.integrations.vllm.worker import KVSwapWorker
from torch_kvswap.integrations.vllm.worker_pools import Host, Replicas, check_one_host, this_host
from torch_kvswap.prefix.engine_sessions import SchedulerSession

_log = logging.getLogger(__name__)


class KVSwapOffloadingSpec(OffloadingSpec):
    """vLLM's OffloadingSpec on torch_kvswap's handler and pages.

    There is one in the scheduler, which asks for the manager, and one in each worker.

    Args:
        config (OffloadingConfig): vLLM's configuration; `extra_config` has the SpecOptions.

    Attributes:
        layers (Sequence[Sequence[str]] | None): names of the layers of each group, which the
            connector sets before it asks for the worker.

    Raises:
        ValueError: an option is unknown, missing or invalid. With a pipeline, get_manager() and
            get_worker() say if there are too few bytes for a chunk.
    """

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(config)
        self.options = read_options(config.extra_config)
        # All workers have equal caches. vLLM reads this: only rank 0 then stores.
        self.replicated_layout = bool(config.replicated_layout)
        self.layers: Sequence[Sequence[str]] | None = None
        self._check()
        self.num_pages, self._chunk_bytes, self._problem = 0, 0, ""
        try:
            self._size_pools()
        except ValueError as error:
            if config.parallel.pp_size == 1:
                raise
            # Only the first stage of a pipeline decides, and the others wait in get_worker().
            self._problem = str(error)
        self._manager: OffloadingManager | None = None
        self._worker: OffloadingWorker | None = None

    def get_manager(self) -> OffloadingManager:
        """The manager, made at the first call."""
        if self._manager is not None:
            return self._manager
        if self._problem:
            raise ValueError(self._problem)
        options, server = self.options, self._host_server()
        if server is None:
            events = self.kv_events_config.enable_kv_cache_events
            how = options.eviction_policy, options.store_threshold, events
            self._manager = KVSwapManager(self.num_pages, *how, self._info(self.num_pages))
            return self._manager
        session = SchedulerSession(server.path, server.worker.engine_id, server.worker.world)
        try:
            session.join()
        except OSError as error:  # a worker has told why
            _log.debug("%s", error)
        session.start()
        self._manager = SharedManager(session, self._info(session.num_pages))
        return self._manager

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """The worker, made at the first call."""
        if self._worker is not None:
            return self._worker
        server, replicas = self._host_server(), None
        if server is None and self.replicated_layout and self.config.parallel.world_size > 1:
            replicas = self._among_workers(is_split=False)
            check_one_host(_hosts_of_workers(replicas))
        try:
            self._worker = KVSwapWorker(
                *(kv_caches, self._pages_of_scheduler(), self.blocks_per_chunk, self.options),
                replicas=replicas,
                server=server,
                layers=self.layers,
            )
        except NoRoomError as error:
            chunk = max(self._chunk_bytes, 1)
            fits = error.room // chunk * chunk
            smaller = f"set it to {fits} or less, or " if fits > 0 else ""
            raise ValueError(
                f"kv_connector_extra_config: cpu_bytes_to_use is {self.options.cpu_bytes_to_use}, "
                f"but {error.problem}; {smaller}{error.otherwise}"
            ) from error
        return self._worker

    def _check(self) -> None:
        """Raises ValueError if an option does not fit the model or the other ones."""
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
        elif options.encoding != "raw" and self.replicated_layout and parallel.world_size > 1:
            why = (
                f"encoding is {options.encoding!r}, but the {parallel.world_size} workers have the "
                "same cache and share raw pages; leave encoding out"
            )
        elif options.host_server and parallel.pp_size * parallel.pcp_size * parallel.dcp_size > 1:
            why = (
                f"host_server is {options.host_server!r}, but pipeline_parallel_size is "
                f"{parallel.pp_size}, prefill_context_parallel_size {parallel.pcp_size} and "
                f"decode_context_parallel_size {parallel.dcp_size}, which must be 1 there; set "
                "cpu_bytes_to_use instead"
            )
        if why:
            raise ValueError(f"kv_connector_extra_config: {why}")

    def _size_pools(self) -> None:
        """Sets how many chunks fit into the bytes of all workers, and the bytes of one in all.

        Equal in the scheduler and in all workers with as many layers as the first one.

        Raises:
            ValueError: not a single chunk fits, or the model has no KV cache.
        """
        block, nbytes = self.config.worker_kv_bytes_per_block, self.options.cpu_bytes_to_use
        if block == 0:
            raise ValueError("this model has no KV cache to offload; leave out kv_transfer_config")
        encoding = read_encoding(self.options.encoding)
        blocks = self.config.cache.blocks_per_chunk
        copies = 1 if self.replicated_layout else self.config.parallel.world_size
        chunk = encoding.bytes_for(block) * blocks * copies
        if self.options.host_server is None and nbytes < chunk:
            raise ValueError(
                f"cpu_bytes_to_use is {nbytes}, but one chunk of {blocks} blocks takes {chunk} "
                "bytes in all workers together"
            )
        self.num_pages, self._chunk_bytes = int(nbytes // chunk), int(chunk)

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

    def _pages_of_scheduler(self) -> int:
        """The number of pages that the scheduler knows: that of the first worker.

        Only the stages of a pipeline can have different numbers of layers, and thus of pages.

        Raises:
            ValueError: the first stage has no room for a page, or no layers.
        """
        if self.config.parallel.pp_size == 1:
            return self.num_pages
        # The group of all workers of an engine exists only if they are on several nodes.
        num_pages = int(get_pp_group().broadcast_object(self.num_pages, src=0))
        if num_pages == 0:
            raise ValueError(
                self._problem or "the first stage of the pipeline has no room for a chunk"
            )
        return num_pages

    def _among_workers(self, is_split: bool) -> Replicas:
        """This worker. is_split: each worker has a part of each page."""
        rank, world = self.config.parallel.rank, self.config.parallel.world_size
        return Replicas(rank, world, self.config.engine_id, (rank, world) if is_split else None)

    def _info(self, num_pages: int) -> Any:
        """What config_info() reports."""
        sizes = num_pages, self._chunk_bytes
        return CPUOffloadingInfo.from_config(self.config, *sizes).as_config_info()


def _hosts_of_workers(replicas: Replicas) -> list[Host]:
    """The hosts of all workers with the same cache, by rank. Each of them must call it."""
    hosts: list[Any] = [None] * replicas.world
    torch.distributed.all_gather_object(hosts, this_host(), group=get_tp_group().cpu_group)
    return hosts
