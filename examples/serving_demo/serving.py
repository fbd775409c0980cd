"""Continuous batching with preemption, in a cache that is too small for all requests.

A step collects finished transfers, makes room for one more token of each running request, computes
this token, and admits other requests that fit, new ones first. If no block is free, the request
that has been on the device for longest is preempted: its blocks are stored on the host, and it is
loaded into other blocks when there is room. Only the request being moved waits for its transfer;
the others are decoded meanwhile.
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
    """Serves requests on the calling thread's current stream.

    Args:
        model (Model): the model.
        cache (list[Tensor]): `model.new_cache(num_blocks)`; each request must fit into it.
        swapper (Swapper): moves requests.
        requests (Iterable[Request]): the requests to serve.
        on_load: called with each request whose load was submitted, before its blocks are used.
    """

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
        self._running: list[Request] = []  # in the order in which they came to the device
        self._swapped: deque[Request] = deque()

    @property
    def is_busy(self) -> bool:
        """Whether a request is not done, or a transfer has not ended."""
        return bool(self._waiting or self._running or self._swapped or self._swapper.is_moving)

    def step(self) -> int:
        """Does one step.

        Returns:
            int: number of tokens generated.

        Raises:
            RuntimeError: a transfer failed, or no request can continue.
        """
        self._collect_transfers()
        self._retire()
        for request in tuple(self._running):
            self._make_room(request)
        generated = self._decode() + self._admit()
        self._load_swapped()
        if generated == 0 and self.is_busy:
            if not self._swapper.is_moving:
                raise RuntimeError(
                    f"no request can continue with {self.blocks.num_free} free blocks"
                )
            self._swapper.wait()
        return generated

    def _collect_transfers(self) -> None:
        for direction, request in self._swapper.poll():
            if direction == "store":
                self.blocks.give(request.blocks)
                request.blocks = []
                self._swapped.append(request)

    def _retire(self) -> None:
        # A request keeps its pages and its reservation until its load is reported.
        for request in [r for r in self._running if r.is_done and r.job is None]:
            self._running.remove(request)
            self._swapper.release(request)
            self.blocks.give(request.blocks)
            request.blocks = []

    def _make_room(self, request: Request) -> None:
        """Makes room for one more token.

        If no block is free, preempts a request, so that a later step finds one.
        """
        if request not in self._running or request.is_done or request.has_room:
            return
        if self.blocks.num_free:
            request.blocks += self.blocks.take(1)
        elif not self._swapper.is_storing:  # a running store will free blocks
            self._preempt()

    def _preempt(self) -> None:
        """Stores the running request that came to the device first."""
        for request in self._running:
            if request.job is None:
                self._running.remove(request)
                self._swapper.store(request)
                return

    def _decode(self) -> int:
        """Computes one token of each request with room, and returns how many."""
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
        """Computes the prompts of new requests that fit, and returns how many."""
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
        """Loads preempted requests that fit."""
        for request in tuple(self._swapped):
            blocks = request.blocks_for(request.cached + 1)  # with room for its next token
            if blocks > self.blocks.num_free:
                continue
            self._swapped.remove(request)
            self._running.append(request)
            request.blocks = self.blocks.take(blocks)
            self._swapper.load(request)
            if self._on_load:
                self._on_load(request)
