"""Repeats a failed transfer with plain copies."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from torch_kvswap.host_pool.pool import HostPool
from torch_kvswap.integrations.vllm.layout import Place
from torch_kvswap.layout import PagedLayout
from torch_kvswap.results import Direction

# Blocks that are kept as they are, outside of their pages: uint8, by page and slot.
Kept: TypeAlias = dict[tuple[int, int], Tensor]


class Retry:
    """Copies block by block and tensor by tensor with torch, without the handler.

    Stores into pages that are encoded or have digests go to memory beside them, to `kept`: a block
    that was rejected does not fit into its slot, and no digest is made here. Loads take a block
    from there first. Other blocks of pages with digests are not loaded, because nothing here tells
    whether they are what was stored.

    Uses its own stream. Never raises: `error` has the problem once has_ended() is true.

    Args:
        layouts (Sequence[PagedLayout]): the groups, with one slab per tensor.
        pools (Sequence[HostPool]): their pages.
        direction (str): "store" or "load".
        places (Sequence[Place]): what to copy.
        kept (Kept): blocks beside such pages; a store adds its own when it ends well.
        has_run (bool): the transfer has run to its end and only rejected blocks. It has waited for
            the kernels that used them before, so the copies start at once. If it failed, they wait
            for the current stream, and thus for these kernels.

    Attributes:
        direction (str): as given.
        error (Exception | None): why it failed.
        seconds (float): time until has_ended() or wait() saw the end.
    """

    def __init__(
        self,
        layouts: Sequence[PagedLayout],
        pools: Sequence[HostPool],
        direction: Direction,
        places: Sequence[Place],
        kept: Kept,
        has_run: bool,
    ) -> None:
        self.direction = direction
        self._layouts, self._pools, self._kept = layouts, pools, kept
        self._stored: Kept = {}  # becomes part of `kept`
        # Host memory of the copies. Some systems copy pageable memory asynchronously, too.
        self._rows_in_use: list[Tensor] = []
        self.error: Exception | None = None
        self.seconds = 0.0
        self._began = time.perf_counter()
        self._end: torch.cuda.Event | None = None
        try:
            self._start(places, has_run)
        except Exception as error:
            self.error = error

    def has_ended(self) -> bool:
        """Whether the copies have ended; does not wait."""
        try:
            ended = self.error is not None or self._end is None or self._end.query()
        except Exception as error:
            self.error, ended = error, True
        if ended and not self.seconds:
            self.seconds = time.perf_counter() - self._began
            if self.error is None:
                self._kept.update(self._stored)
        return bool(ended)

    def wait(self) -> None:
        """Blocks the host until the copies have ended."""
        try:
            if self._end is not None:
                self._end.synchronize()
        except Exception as error:
            self.error = error
        self.has_ended()

    def _start(self, places: Sequence[Place], has_run: bool) -> None:
        device = self._layouts[0].device
        if device.type == "cpu":
            self._copy(places)
            return
        stream = torch.cuda.Stream(device)
        if not has_run:
            stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            self._copy(places)
            self._end = torch.cuda.Event()
            self._end.record(stream)

    def _copy(self, places: Sequence[Place]) -> None:
        for on_gpu, on_host in self._rows(places):
            target, source = (on_host, on_gpu) if self.direction == "store" else (on_gpu, on_host)
            target.copy_(source, non_blocking=True)

    def _rows(self, places: Sequence[Place]) -> Iterator[tuple[Tensor, Tensor]]:
        """The bytes on the GPU and on the host, of each block and tensor."""
        for place in places:
            row, begin = self._row(place), 0
            self._rows_in_use.append(row)
            for tensor in self._layouts[place.group].tensors:
                on_gpu = tensor[place.block].view(torch.uint8)
                yield on_gpu, row[begin : begin + len(on_gpu)]
                begin += len(on_gpu)

    def _row(self, place: Place) -> Tensor:
        """The bytes of a block on the host, or memory for them."""
        pool, key = self._pools[place.group], (place.page, place.slot)
        if pool.encoding == "raw" and pool.verify == "off":
            return pool.pages[key]
        if self.direction == "store":
            pool._forget_block(*key)  # an older one, which nobody must read
            self._stored[key] = torch.empty(pool.layout.block_bytes, dtype=torch.uint8)
            return self._stored[key]
        found = self._kept.get(key)
        if found is not None:
            return found
        if pool.verify != "off":
            raise RuntimeError(f"page {place.page} has digests, which plain copies do not compare")
        return pool.read_block(*key)
