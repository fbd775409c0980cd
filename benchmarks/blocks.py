"""A cache and host pages in which no two blocks share a word, and what they should hold."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from timing import synchronize
from torch import Tensor

from torch_kvswap import HostPool, PagedLayout

_ODD = -7046029254386353131  # multiplying by it gives every number other bytes
_CHUNK_BYTES = 64 << 20  # looked at in one go


class NumberedBlocks:
    """`count` blocks in tensors on the device, and as many host pages of one block each.

    The tensors are slices of one allocation, so that all of them are equally far apart.
    """

    def __init__(self, device: torch.device, count: int, layers: int, fragment_bytes: int) -> None:
        self.count = count
        self.device = device
        self._words = fragment_bytes // 8
        whole = torch.zeros(layers, count, self._words, dtype=torch.int64, device=device)
        self._tensors = list(whole)
        self.layout = PagedLayout(self._tensors)
        # torch copies whole slices of it, which may not straddle two registrations
        self.host = HostPool(self.layout, count, chunk_bytes=64 << 30)
        self._fills = 0
        self.refill()

    def refill(self) -> None:
        """Gives all blocks and pages bytes that they never had before."""
        numbers = 2 * self.count * self._fills + torch.arange(2 * self.count)
        self._fills += 1
        self._in_blocks, self._in_pages = numbers.split(self.count)
        for chunk, blocks, pages in self._expected():
            for tensor, part in zip(self._tensors, blocks.split(self._words, dim=1), strict=True):
                tensor[chunk] = part
            self._pages[chunk].copy_(pages)
        synchronize(self.device)  # a job that waits for an event does not wait for these kernels

    def note(self, direction: str, blocks: Tensor, pages: Tensor) -> None:
        """These blocks were stored to these pages, or loaded from them; each at most once."""
        if direction == "store":
            self._in_pages[pages] = self._in_blocks[blocks]
        else:
            self._in_blocks[blocks] = self._in_pages[pages]

    def wrong(self) -> int:
        """Blocks and pages, touched or not, whose bytes are not what they should be."""
        wrong = 0
        for chunk, blocks, pages in self._expected():
            found = torch.cat([tensor[chunk] for tensor in self._tensors], dim=1)
            wrong += int((found != blocks).any(1).sum())
            wrong += int((self._pages[chunk].to(self.device) != pages).any(1).sum())
        return wrong

    @property
    def _pages(self) -> Tensor:
        return self.host.pages.view(torch.int64).squeeze(1)

    def _expected(self) -> Iterator[tuple[slice, Tensor, Tensor]]:
        step = max(1, _CHUNK_BYTES // self.layout.block_bytes)
        for start in range(0, self.count, step):
            chunk = slice(start, start + step)
            yield chunk, self._bytes(self._in_blocks[chunk]), self._bytes(self._in_pages[chunk])

    def _bytes(self, numbers: Tensor) -> Tensor:
        width = self._words * len(self._tensors)
        words = torch.arange(width, device=self.device)
        return (numbers.to(self.device)[:, None] * width + words) * _ODD
