"""Serves many requests at once from a cache that need not hold them: continuous batching with
preemption.

A step takes back what finished transfers let go, finds room for one more token of each running
request, computes it for those that have room, and brings in others that fit, new ones first. When
the blocks run out, the request that was on the device for longest is preempted: its blocks go to
the host, and it comes back into other blocks when there is room. Nobody waits for a transfer but
the request that moves: the others are decoded meanwhile.
"""

from collections import deque
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from serving_demo.block_allocator import BlockAllocator
from serving_demo.model import Model
from serving_demo.request import Request
from serving_demo.swapper import Swapper


class Server:
    """Runs on the calling thread's current stream. `cache` is `model.new_cache(num_blocks)`, and
    no request may need more than `num_blocks`. `on_load` is called with a request whose load was
    submitted, before anything uses the blocks."""

    def __init__(
        self,
        model: Model,
        cache: list[Tensor],
        swapper: Swapper,
        requests: Iterable[Request],
        on_load: Callable[[Request], None] | None = None,
    ) -> None:
        self.blocks = BlockAllocator(cache[0].shape[1])
        self._model = model
        self._cache = cache
        self._swapper = swapper
        self._on_load = on_load
        self._waiting = deque(requests)
        self._running: list[Request] = []  # those that came to the device first are first
        self._swapped: deque[Request] = deque()

    @property
    def is_busy(self) -> bool:
        return bool(self._waiting or self._running or self._swapped or self._swapper.is_moving)

    def step(self) -> int:
        """Returns how many tokens it generated. Raises when a transfer failed."""
        self._collect_transfers()
        self._retire()
        for request in tuple(self._running):
            self._make_room(request)
        generated = self._decode() + self._admit()
        self._load_swapped()
        if generated == 0 and self.is_busy:
            if not self._swapper.is_moving:
                raise RuntimeError(f"no request can go on with {self.blocks.num_free} free blocks")
            self._swapper.wait()
        return generated

    def _collect_transfers(self) -> None:
        for direction, request in self._swapper.poll():
            if direction == "store":
                self.blocks.give(request.blocks)
                request.blocks = []
                self._swapped.append(request)

    def _retire(self) -> None:
        # One whose load is still to be reported keeps its pages and its reservation until then.
        for request in [r for r in self._running if r.is_done and r.job is None]:
            self._running.remove(request)
            self._swapper.release(request)
            self.blocks.give(request.blocks)
            request.blocks = []

    def _make_room(self, request: Request) -> None:
        """Room for one more token; if there is none, somebody is preempted for a later step."""
        if request not in self._running or request.is_done or request.has_room:
            return
        if self.blocks.num_free:
            request.blocks += self.blocks.take(1)
        elif not self._swapper.is_storing:  # else blocks are on their way already
            self._preempt()

    def _preempt(self) -> None:
        for request in self._running:
            if request.job is None:
                self._running.remove(request)
                self._swapper.store(request)
                return

    def _decode(self) -> int:
        batch = [r for r in self._running if r.has_room and not r.is_done]
        if not batch:
            return 0
        rows = [[r.tokens[-1], *self._model.padded(r.blocks)] for r in batch]
        tokens = []
        for request, row in zip(batch, torch.tensor(rows, device=self._model.device), strict=True):
            self._swapper.order_behind_load(request)
            tokens.append(self._model.decode(row[:1], request.cached, self._cache, row[1:]))
            request.cached += 1
        for request, token in zip(batch, torch.cat(tokens).tolist(), strict=True):
            request.tokens.append(token)
        return len(batch)

    def _admit(self) -> int:
        admitted = 0
        while self._waiting:
            request = self._waiting[0]
            blocks = request.blocks_for(len(request.prompt))
            if blocks > self.blocks.num_free or not self._swapper.reserve(request):
                break
            self._running.append(self._waiting.popleft())
            request.blocks = self.blocks.take(blocks)
            table = torch.tensor(self._model.padded(request.blocks), device=self._model.device)
            request.tokens.append(int(self._model.prefill(request.prompt, self._cache, table)))
            request.cached = len(request.prompt)
            admitted += 1
        return admitted

    def _load_swapped(self) -> None:
        for request in tuple(self._swapped):
            blocks = request.blocks_for(request.cached + 1)  # it comes back to go on
            if blocks > self.blocks.num_free:
                continue
            self._swapped.remove(request)
            self._running.append(request)
            request.blocks = self.blocks.take(blocks)
            self._swapper.load(request)
            if self._on_load:
                self._on_load(request)
