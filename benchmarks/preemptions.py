"""A continuous batching in which one large request is preempted and comes back, when asked."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
import transformers as hf
from generations import batching
from timing import Call, synchronize
from transformers.generation.continuous_batching.requests import RequestState, RequestStatus

from torch_kvswap.integrations.transformers.cache_view import CacheView
from torch_kvswap.integrations.transformers.swap_manager import SwapManager

SMALL = 8  # requests that run beside it
LIMIT = 500  # batches within which it is back


@dataclass(frozen=True)
class Loss:
    """Of one preemption, store and restore, in microseconds. host: in the calls of the manager, and
    wherever the cache gives the request its blocks again, which one manager calls and the other
    leaves to the scheduler. stream: from the begin of these calls until the model's stream has done
    what they gave to it, with the host's time."""

    host: float
    stream: float


class Preemptions:
    """Requests with as many tokens in the cache as they say, which nobody has computed: small ones,
    and one of `blocks` blocks. All the rest of the cache belongs to nobody."""

    def __init__(self, model: Any, block_tokens: int, blocks: int) -> None:
        self._model, self._tokens, self._blocks = model, block_tokens, blocks
        config = model.config
        self.block_bytes = (
            2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
        ) * (block_tokens * model.dtype.itemsize)
        gib = 1.2 * blocks * self.block_bytes / 2**30
        how = {"max_batch_tokens": 64, "use_async_batching": False}
        generation = hf.GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
        self._manager = model.init_continuous_batching(
            generation_config=generation,
            continuous_batching_config=batching(block_tokens, blocks + 12 * SMALL, gib, **how),
        )
        self._processor = self._manager._create_batch_processor()
        self._cache, self._scheduler = self._processor.cache, self._processor.scheduler
        self._offloading = self._processor.offloading_manager
        self._stream = self._processor.inputs_and_outputs.compute_stream
        self._view = CacheView(self._cache)
        self._calls: list[Call] = []
        self._in_call = False
        self._name = ""  # of the large request
        self._outside = 0.0  # microseconds in the cache, for that request, and in no call
        self._batch: list[str] = []  # the requests of the last one
        self._count = self.wrong = 0
        for tensor in self._view.layout.tensors:
            tensor.view(model.dtype).normal_()
        self._small = [self._add(f"small {number}", 3) for number in range(SMALL)]
        self._watch(self._offloading, "offload_requests")
        self._watch(self._offloading, "restore_scheduled_requests")
        self._watch(self._scheduler, "_get_waiting_candidates")
        self._watch_blocks("free_blocks")
        self._watch_blocks("can_store_request_tokens")

    def preempt(self, overwrites: bool = False) -> Loss:
        """Preempts the large request beside a batch of the others and brings it back.

        Args:
            overwrites: whether its blocks are overwritten meanwhile. It gets the same blocks again,
                so that without this a restore that copies nothing goes unnoticed. Not for samples:
                what was stored has to be waited for.
        """
        self._count += 1
        self._name = name = f"large {self._count}"
        rest = f"rest {self._count}"
        self._step()
        state, blocks = self._fill(name, rest)
        before = self._contents(blocks)
        self._calls.clear()
        self._outside = 0.0
        self._step()
        assert state.is_cpu_offloaded, "the large request was not preempted"
        if overwrites:
            self._overwrite(blocks)
        self._cache.free_blocks(rest)
        self._step()
        self._scheduler.block_new_requests = False  # as when another request has ended
        for _ in range(LIMIT):
            self._step()
            if name in self._batch:
                break
        else:
            raise RuntimeError("the large request does not come back")
        calls, outside = list(self._calls), self._outside
        self._step()
        after = self._contents(self._blocks_of(name)[: len(blocks)])
        self.wrong += not all(map(torch.equal, after, before))
        self._scheduler.finish_request(name)
        return Loss(
            host=sum(call.host for call in calls) + outside,
            stream=sum(call.on_stream for call in calls) + outside,
        )

    def _fill(self, name: str, rest: str) -> tuple[Any, list[int]]:
        """A large request and its blocks; all free blocks are in the hands of another one."""
        state = self._add(name, self._blocks)  # the next token needs one more
        self._add(rest, self._free_blocks(), runs=False)
        return state, self._blocks_of(name)

    def _add(self, name: str, blocks: int, runs: bool = True) -> Any:
        """A request that decodes, whose tokens fill so many blocks."""
        length = blocks * self._tokens
        state = RequestState(request_id=name, initial_tokens=[1] * length, max_new_tokens=None)
        assert self._cache.can_store_request_tokens(state, length)
        if runs:
            self._decode(state, length)
            self._scheduler.active_requests[name] = state
        return state

    def _decode(self, state: Any, length: int) -> None:
        state._status = RequestStatus.DECODING
        state.position_offset = length
        state.remaining_prefill_tokens = []
        state.generated_tokens, state.tokens_to_process = [1], [1]

    def _free_blocks(self) -> int:
        self._cache.pool.try_to_free_sectors()
        [group] = self._view.groups
        free = self._cache.pool.num_free_sectors * group.blocks_per_sector
        return int(free + self._cache.pool.count_free_blocks(group.index))

    def _step(self) -> None:
        """A batch, which ends on the device too."""
        for state in self._small:  # they never need another block
            self._decode(state, self._tokens)
        with torch.no_grad():
            assert self._processor.prepare_next_batch()
            self._processor._generation_step(self._model)
            self._processor.update_batch()

    def _watch(self, owner: Any, name: str) -> None:
        method = getattr(owner, name)

        def watched(*arguments: Any) -> Any:
            if name == "restore_scheduled_requests":
                self._batch = [future.state.request_id for future in arguments[0]]
            call = Call(self._stream)
            self._in_call = True
            try:
                return method(*arguments)
            finally:
                call.end()
                self._in_call = False
                self._calls.append(call)

        setattr(owner, name, watched)

    def _watch_blocks(self, name: str) -> None:
        method = getattr(self._cache, name)

        def watched(*arguments: Any, **options: Any) -> Any:
            names = [getattr(argument, "request_id", argument) for argument in arguments]
            counts = self._name in names and not (self._in_call or options.get("dry_run"))
            begin = perf_counter()
            try:
                return method(*arguments, **options)
            finally:
                if counts:
                    self._outside += (perf_counter() - begin) * 1e6

        setattr(self._cache, name, watched)

    def _blocks_of(self, name: str) -> list[int]:
        [blocks] = self._view.units(self._view.tables(name))
        return list(blocks)

    def _contents(self, blocks: list[int]) -> list[torch.Tensor]:
        contents = [tensor[blocks] for tensor in self._view.layout.tensors]
        synchronize(self._model.device)
        return contents

    def _overwrite(self, blocks: list[int]) -> None:
        """When they were stored."""
        if isinstance(self._offloading, SwapManager):
            assert self._offloading.parked is not None
            self._offloading.parked.swap.handler.synchronize()
        synchronize(self._model.device)
        for tensor in self._view.layout.tensors:
            tensor[blocks] = 0
        synchronize(self._model.device)
