"""Preempted requests: parked on the host, loading, and running again."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.generation.continuous_batching.requests import RequestStatus

from torch_kvswap.integrations.transformers.cache_view import CacheView
from torch_kvswap.integrations.transformers.swap import Copy, Stored, Swap

FAILED, RUNNING, DONE = range(3)
logger = logging.getLogger("ContinuousBatchingLogger")  # transformers' own


@dataclass
class Parked:
    """A preempted request.

    Attributes:
        state: transformers' state of the request.
        stored (Stored): where its blocks are.
        load (Copy | None): the load, once the request has blocks on the GPU again.
    """

    state: Any
    stored: Stored
    load: Copy | None = None


def least_of_ranks(helper: Any, numbers: list[int]) -> list[int]:
    """The minimum of each number over all tensor-parallel ranks, which must decide alike."""
    if helper.tp_size == 1:
        return numbers
    here = torch.tensor(numbers, dtype=torch.int64, device="cpu")
    of_all = helper.tp_all_reduce_min(here, on_cpu=True)
    result: list[int] = of_all.tolist()
    return result


class ParkedRequests:
    """All preempted requests.

    A preempted request is parked. When there is room, it gets blocks and is loaded; then it runs. A
    request whose blocks are lost starts again. When this object is dropped, no pages stay taken.
    """

    def __init__(self, view: CacheView, scheduler: Any, swap: Swap, helper: Any) -> None:
        self.view, self.scheduler, self.swap, self._helper = view, scheduler, swap, helper
        self.requests: dict[str, Parked] = {}
        self._restored: set[str] = set()  # loaded, but not in a batch yet

    def hook_scheduler(self) -> None:
        """Makes the scheduler choose from ready() instead of all waiting requests."""
        parked, scheduler = weakref.ref(self), weakref.ref(self.scheduler)
        find = type(self.scheduler)._get_waiting_candidates

        def candidates() -> list[Any]:
            found: list[Any] = find(scheduler())
            here = parked()
            return found if here is None else here.ready(found)

        self.scheduler._get_waiting_candidates = candidates

    def park(self, state: Any, tables: Sequence[Sequence[int]]) -> bool:
        """Starts to store a request that was running; returns False if there is no room."""
        self._restored.discard(state.request_id)
        stored = self.swap.store(self.view.units(tables)) if any(tables) else None
        if stored is None:
            return False
        self.requests[state.request_id] = Parked(state, stored)
        state.is_cpu_offloaded = True
        return True

    def ready(self, candidates: list[Any]) -> list[Any]:
        """The waiting requests that may be in the next batch. Starts to load others."""
        if not self.requests:
            return candidates
        ready = self._collect_ready(candidates)
        if not self.requests:
            return ready
        self._start_loading(candidates)
        if self.scheduler.active_requests:
            return ready
        waiting = [state for state in candidates if state.request_id in self.requests]
        if not waiting:
            return ready
        loads = [self.requests[state.request_id].load for state in waiting]
        load = next((load for load in loads if load is not None), None)
        if load is None:
            return ready or waiting  # a single request that is too large: the scheduler reports it
        # Wait for the load. If its blocks were taken for others that do not fit beside it, it would
        # be loaded again and again.
        self.swap.wait(load)
        return self._collect_ready(waiting + ready)

    def stop_loading(self) -> bool:
        """Takes the blocks of all loading requests away, for other requests.

        The copies continue.

        Returns:
            bool: whether there were any.
        """
        loading = [parked for parked in self.requests.values() if parked.load is not None]
        for parked in loading:
            self._take_blocks(parked)
        if loading and self.scheduler.active_requests:
            self.scheduler.block_new_requests = True  # until a running request has ended
        return bool(loading)

    def enter(self, requests_in_batch: Sequence[Any]) -> None:
        """Prepares requests that are in the next batch."""
        if not self.requests and not self._restored:
            return
        for future in requests_in_batch:
            name = future.state.request_id
            if name in self.requests:
                # The scheduler gave it blocks by itself. In the known versions it does not: ready()
                # offers a request that is not loaded only if not even one more token fits. A failed
                # load raises here, because the batch would read blocks without contents.
                parked = self.requests[name]
                self.swap.handler.synchronize(self._load(parked).job)
                self._activate(parked)
            if name in self._restored:
                self._restored.remove(name)
                self.view.mark_restored(future)

    def drop(self, state: Any) -> None:
        """Forgets a request, and frees its pages and, if it waits, its blocks."""
        self._restored.discard(state.request_id)
        parked = self.requests.pop(state.request_id, None)
        if parked is not None:
            self.swap.discard(parked.stored)
            self._take_blocks(parked)
            state.is_cpu_offloaded = False

    def drop_all(self) -> None:
        """Forgets all requests."""
        for parked in list(self.requests.values()):
            self.drop(parked.state)
        self._restored.clear()

    def _start_loading(self, candidates: Sequence[Any]) -> None:
        """Loads all requests that fit, in the order of their preemption."""
        of_all = [self.requests.get(state.request_id) for state in candidates]
        waiting = [parked for parked in of_all if parked and parked.load is None]
        if not waiting or not self.view.has_margin(self.scheduler):
            return
        fitting = [parked for parked in waiting if self.view.fits(parked.state)]
        if not fitting:  # the usual case, while the cache is full
            return
        demand = self.view.demand(self.scheduler)
        for parked in fitting:
            if self.view.allocate(parked.state, demand):
                self._load(parked)

    def _load(self, parked: Parked) -> Copy:
        units = self.view.units(self.view.tables(parked.state.request_id))
        parked.load = self.swap.load(parked.stored, units)
        return parked.load

    def _collect_ready(self, candidates: Sequence[Any]) -> list[Any]:
        """The candidates that can run: not preempted, loaded, or started again."""
        of_all = [self.requests.get(state.request_id) for state in candidates]
        ended = self._outcomes([parked for parked in of_all if parked and parked.load])
        ready = []
        for state, parked in zip(candidates, of_all, strict=True):
            if parked is None:
                ready.append(state)
            elif ended.get(state.request_id) == DONE:
                self._activate(parked)
                ready.append(state)
            elif ended.get(state.request_id) == FAILED:
                ready.append(self._begin_anew(parked))
        return ready

    def _outcomes(self, loading: Sequence[Parked]) -> dict[str, int]:
        """FAILED, RUNNING or DONE for each loading request, the same on all ranks."""
        if not loading:
            return {}
        self.swap.collect()
        outcomes = [RUNNING] * len(loading)
        for number, parked in enumerate(loading):
            if parked.load is not None and parked.load.ok is not None:
                outcomes[number] = DONE if parked.load.ok else FAILED
        names = (parked.state.request_id for parked in loading)
        return dict(zip(names, least_of_ranks(self._helper, outcomes), strict=True))

    def _activate(self, parked: Parked) -> None:
        """Makes a loaded request run again, and frees its pages."""
        state, scheduler = parked.state, self.scheduler
        name = state.request_id
        if scheduler.waiting_requests.pop(name, None) is not None:
            scheduler.waiting_requests_order.remove(name)
            scheduler.active_requests[name] = state
            if len(state.remaining_prefill_tokens) == 1 and not state.num_children:
                state.tokens_to_process, state.remaining_prefill_tokens = (
                    state.remaining_prefill_tokens,
                    [],
                )
                state.status = RequestStatus.DECODING
            else:
                state.status = RequestStatus.PREFILLING
        del self.requests[name]
        self.swap.free(parked.stored)
        state.is_cpu_offloaded = False
        self._restored.add(name)

    def _begin_anew(self, parked: Parked) -> Any:
        """Replaces a request whose blocks are lost by one that computes them again."""
        assert parked.load is not None
        result = parked.load.job.result
        why = result.error if result and not result.ok else "it failed on another rank"
        name = parked.state.request_id
        logger.warning(f"request {name} is computed again: its blocks are lost ({why})")
        self.drop(parked.state)
        anew = parked.state.create_equivalent_initial_request()
        parked.state._status = RequestStatus.FINISHED  # it may still be in a batch
        self.scheduler.waiting_requests[name] = anew
        return anew

    def _take_blocks(self, parked: Parked) -> None:
        """Takes the blocks of a waiting request away. If it is being loaded, the copy continues."""
        if parked.load is not None:
            parked.load.is_exposed = True
            parked.load = None
        self.view.release(parked.state)
