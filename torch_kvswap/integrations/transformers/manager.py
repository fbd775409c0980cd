"""Takes the place of transformers' offloading manager: same decisions, copies beside the model."""

from __future__ import annotations

from typing import Any

import torch
from transformers.generation.continuous_batching.offloading_manager import OffloadingManager

from torch_kvswap.integrations.transformers.cache import Cache
from torch_kvswap.integrations.transformers.parked import ParkedRequests, least, logger
from torch_kvswap.integrations.transformers.swap import Options, Swap


class SwapManager(OffloadingManager):  # type: ignore[misc]  # it has no types
    """Which requests are preempted, transformers decides, and which of them wait for room.

    The blocks of a preempted request are stored beside the batches that follow, which wait for a
    part of them only if they write these blocks. When there is room again they are loaded, also
    beside other batches, and only then does the scheduler see the request, as one that runs. What
    cannot be restored is computed again. view: how this version keeps its caches. The other
    arguments are those of transformers. Belongs to the thread that generates.
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
        view: type[Cache],
        options: Options,
    ) -> None:
        # Not that of the base class, which would take host memory of its own.
        self.cache, self.scheduler = cache, scheduler
        self.view = view(cache)
        nbytes = self.view.host_bytes(self, cpu_offload_space_gib, safety_threshold)
        [num_pages] = least(distributed_helper, [nbytes // self.view.layout.block_bytes])
        self.parked: ParkedRequests | None = None
        if num_pages:
            swap = Swap(self.view.layout, num_pages, compute_stream, options)
            self.parked = ParkedRequests(self.view, scheduler, swap, distributed_helper)
            self.parked.answer_the_scheduler()
        elif cpu_offload_space_gib:
            logger.warning(
                f"cpu_offload_space={cpu_offload_space_gib} GiB is less than a block, of "
                f"{self.view.layout.block_bytes} bytes: preempted requests are computed again"
            )

    def offload_requests(self) -> Any:
        """Frees blocks for requests that run and lack some: first those of requests that are being
        loaded, whose pages are still there, then those of other requests that run."""
        given_back = self.parked is not None and self.parked.stop_loading()
        return super().offload_requests() or given_back

    def _offload_to_cpu(
        self, victims: list[Any], tables: dict[str, dict[str, list[int]]] | None = None
    ) -> set[str]:
        """Called by the base class. tables: the blocks that the victims had, where they have none
        any more. Returns the ids of those that need not be computed again."""
        if self.parked is None:
            return set()
        kept = set()
        for state in victims:
            name = state.request_id
            blocks = self.view.tables(name) if tables is None else list(tables[name].values())
            if self.parked.park(state, blocks):
                kept.add(name)
        return kept

    def restore_scheduled_requests(self, requests_in_batch: list[Any]) -> None:
        """Before each batch: makes it wait for the copies that its writes would spoil."""
        if self.parked is None:
            return
        self.parked.enter(requests_in_batch)
        # Forks copy into free blocks, behind this batch.
        forks = self.scheduler._requests_to_fork
        self.parked.swap.guard(None if forks else self.view.written(requests_in_batch))

    def free_request_cpu_cache(self, state: Any, keep_unsorted: bool = False) -> None:
        """The request was cancelled, wherever it is."""
        if self.parked is not None:
            self.parked.drop(state)

    def free_all_waiting_cpu_caches(self) -> None:
        """All requests have failed, also those that were being preempted just then."""
        if self.parked is not None:
            self.parked.drop_all()

    def reset(self) -> None:
        if self.parked is not None:
            self.parked.drop_all()
            self.parked.swap.reset()
