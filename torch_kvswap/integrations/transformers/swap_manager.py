"""Replaces transformers' offloading manager: same decisions, copies beside the model."""

from __future__ import annotations

from typing import Any

import torch
from transformers.generation.continuous_batching.offloading_manager import OffloadingManager

from torch_kvswap._native.log import log
from torch_kvswap.integrations.transformers.cache_view import CacheView
from torch_kvswap.integrations.transformers.parked import (
    ParkedRequests,
    least_of_ranks,
    logger,
)
from torch_kvswap.integrations.transformers.swap import Swap, SwapOptions


class SwapManager(OffloadingManager):  # type: ignore[misc]  # transformers has no types here
    """transformers decides which requests are preempted and which of them wait for room.

    The blocks of a preempted request are stored while later batches run. A batch waits only for the
    parts that it overwrites. When there is room again, the blocks are loaded, also beside other
    batches, and only then does the scheduler see the request as running. A request that cannot be
    restored is computed again. Used by the generating thread only.

    Args:
        cache, scheduler, cpu_offload_space_gib, safety_threshold, compute_stream,
            distributed_helper: as in transformers' OffloadingManager.
        options (SwapOptions): copy options.
    """

    def __init__(
        self,
        cache: Any,
        scheduler: Any,
        cpu_offload_space_gib: float | None,
        safety_threshold: float,
        compute_stream: torch.cuda.Stream | None,
        distributed_helper: Any,
        *,
        options: SwapOptions,
    ) -> None:
        # Does not call the base class's __init__, which would allocate its own host memory.
        self.cache, self.scheduler = cache, scheduler
        self.view = CacheView(cache)
        sectors = self._compute_num_cpu_sectors(cpu_offload_space_gib, safety_threshold)
        nbytes, page_bytes = sectors * cache.bytes_per_sector, options.page_bytes(self.view.layout)
        [num_pages] = least_of_ranks(distributed_helper, [nbytes // page_bytes])
        self.parked: ParkedRequests | None = None
        if num_pages:
            swap = Swap(self.view.layout, num_pages, compute_stream, options)
            self.parked = ParkedRequests(self.view, scheduler, swap, distributed_helper)
            self.parked.hook_scheduler()
            log.info("torch_kvswap moves the KV-cache blocks of transformers: %s", swap.pool)
        elif cpu_offload_space_gib:
            logger.warning(
                f"cpu_offload_space={cpu_offload_space_gib} GiB is less than a page of "
                f"{page_bytes} bytes: preempted requests are computed again"
            )

    def offload_requests(self) -> bool:
        """Frees blocks for running requests that lack some.

        Takes blocks from requests that are being loaded first, because their pages still have the
        contents, and then from other running requests.

        Returns:
            bool: whether blocks were freed, as in the base class.
        """
        given_back = self.parked is not None and self.parked.stop_loading()
        return bool(super().offload_requests() or given_back)

    def _offload_to_cpu(
        self, victims: list[Any], tables: dict[str, dict[str, list[int]]]
    ) -> set[str]:
        """Stores preempted requests. Called by the base class.

        Args:
            victims: states of the requests.
            tables: the blocks that the requests had.

        Returns:
            set[str]: ids of the requests that need not be computed again.
        """
        if self.parked is None:
            return set()
        parked = set()
        for state in victims:
            name = state.request_id
            if self.parked.park(state, list(tables[name].values())):
                parked.add(name)
        return parked

    def restore_scheduled_requests(self, requests_in_batch: list[Any]) -> None:
        """Called before each batch: makes it wait for copies of the blocks that it writes."""
        if self.parked is None:
            return
        self.parked.enter(requests_in_batch)
        # Forks copy into free blocks after this batch, so then it waits for all copies.
        forks = self.scheduler._requests_to_fork
        self.parked.swap.guard(None if forks else self.view.written(requests_in_batch))

    def free_request_cpu_cache(self, state: Any) -> None:
        """Forgets a cancelled request, wherever it is."""
        if self.parked is not None:
            self.parked.drop(state)

    def free_all_waiting_cpu_caches(self) -> None:
        """Forgets all requests after a failure, including those just being preempted."""
        if self.parked is not None:
            self.parked.drop_all()

    def reset(self) -> None:
        """Forgets all requests and waits for their copies."""
        if self.parked is not None:
            self.parked.drop_all()
            self.parked.swap.reset()
