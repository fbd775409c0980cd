"""A cache and host pages in which no two blocks share a word, and what they should hold."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any
from unittest import mock

import torch
from timing import synchronize
from torch import Tensor

from torch_kvswap import HostPool, PagedLayout
from torch_kvswap.host_pool import pinning

_ODD = -7046029254386353131  # multiplying by it gives every number other bytes
_CHUNK_BYTES = 64 << 20  # looked at in one go
_STEP = 512  # bytes by which torch aligns what it allocates on a GPU

# How the layers of a cache lie in memory. Serving engines allocate one tensor after another.
ONE_BY_ONE, ONE_TENSOR = "layers one by one", "one tensor"
ARRANGEMENTS = (ONE_BY_ONE, ONE_TENSOR)


class NumberedBlocks:
    """`count` blocks in tensors on the device, and as many host pages of one block each.

    tensors: of each layer, int64 [count, words of a fragment].

    Args:
        arrangement: ONE_TENSOR: the layers are slices of one allocation, and all distances between
            neighbours are equal. ONE_BY_ONE: each has its own, and no two distances are equal.
        dtype: of the tensors.
        pool_options: of the HostPool.
    """

    def __init__(
        self,
        device: torch.device,
        count: int,
        layers: int,
        fragment_bytes: int,
        arrangement: str = ONE_BY_ONE,
        dtype: torch.dtype = torch.int64,
        **pool_options: Any,
    ) -> None:
        self.count = count
        self.device = device
        self._words = fragment_bytes // 8
        if arrangement == ONE_TENSOR:
            whole = torch.empty(layers, count, self._words, dtype=torch.int64, device=device)
            self.tensors = list(whole)
        else:
            flat = _one_by_one(device, layers, count * fragment_bytes)
            self.tensors = [layer.view(torch.int64).view(count, self._words) for layer in flat]
            if len(set(distances(self.tensors))) != layers - 1:
                raise RuntimeError("layers that were allocated one by one lie at equal distances")
        self.layout = PagedLayout([tensor.view(dtype) for tensor in self.tensors])
        # torch copies whole slices of it, which may not straddle two registrations
        with mock.patch.object(pinning, "CHUNK_BYTES", 64 << 30):
            self.host = HostPool(self.layout, count, **pool_options)
        self._fills = 0
        self.refill()

    def refill(self) -> None:
        """Gives all blocks and pages bytes that they never had before."""
        self._number_anew()
        self._fill_blocks(self._in_blocks)
        for chunk in self._chunks():
            self.pages[chunk].copy_(self._bytes(self._in_pages[chunk]))
        synchronize(self.device)  # a job that waits for an event does not wait for these kernels

    def _number_anew(self) -> None:
        numbers = 2 * self.count * self._fills + torch.arange(2 * self.count)
        self._fills += 1
        self._in_blocks, self._in_pages = numbers.split(self.count)

    def _fill_blocks(self, numbers: Tensor) -> None:
        for chunk in self._chunks():
            parts = self._bytes(numbers[chunk]).split(self._words, dim=1)
            for tensor, part in zip(self.tensors, parts, strict=True):
                tensor[chunk] = part

    def note(self, direction: str, blocks: Tensor, pages: Tensor) -> None:
        """These blocks were stored to these pages, or loaded from them; each at most once."""
        if direction == "store":
            self._in_pages[pages] = self._in_blocks[blocks]
        else:
            self._in_blocks[blocks] = self._in_pages[pages]

    def wrong(self) -> int:
        """Blocks and pages, touched or not, whose bytes are not what they should be."""
        wrong = self._wrong_blocks()
        for chunk in self._chunks():
            pages = self._bytes(self._in_pages[chunk])
            wrong += int((self.pages[chunk].to(self.device) != pages).any(1).sum())
        return wrong

    def _wrong_blocks(self) -> int:
        wrong = 0
        for chunk in self._chunks():
            found = torch.cat([tensor[chunk] for tensor in self.tensors], dim=1)
            wrong += int((found != self._bytes(self._in_blocks[chunk])).any(1).sum())
        return wrong

    @property
    def pages(self) -> Tensor:
        """int64 [count, words of a block]."""
        return self.host.pages.view(torch.int64).squeeze(1)

    def _chunks(self) -> Iterator[slice]:
        step = max(1, _CHUNK_BYTES // self.layout.block_bytes)
        return (slice(start, start + step) for start in range(0, self.count, step))

    def _bytes(self, numbers: Tensor) -> Tensor:
        width = self._words * len(self.tensors)
        words = torch.arange(width, device=self.device)
        return (numbers.to(self.device)[:, None] * width + words) * _ODD


def distances(tensors: list[Tensor]) -> list[int]:
    """Bytes from each tensor to the next."""
    return [after.data_ptr() - before.data_ptr() for before, after in pairwise(tensors)]


def _one_by_one(device: torch.device, layers: int, nbytes: int) -> list[Tensor]:
    """An allocation for each layer, in the order of their addresses.

    Allocations of one size often lie at equal distances. So each is a little larger than its layer,
    which begins at the first place in it whose distance from the layer before is a new one.
    """
    room = layers * _STEP  # each earlier distance excludes one place at most
    whole = [torch.empty(nbytes + room, dtype=torch.uint8, device=device) for _ in range(layers)]
    placed: list[Tensor] = []
    seen: set[int] = set()
    for allocation in sorted(whole, key=Tensor.data_ptr):
        places = (allocation[at : at + nbytes] for at in range(0, room, _STEP))
        if placed:
            places = (one for one in places if distances([placed[-1], one])[0] not in seen)
        placed.append(next(places))
        seen.update(distances(placed[-2:]))
    return placed
