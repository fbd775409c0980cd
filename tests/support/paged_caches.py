"""Paged caches of every layout, with guard bytes around their blocks, and reference stores and
loads in plain PyTorch.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torch_kvswap import HostPool, OffloadHandler, PagedLayout
from torch_kvswap.results import Result

GUARD = 64  # bytes before and behind a tensor
NUM_BLOCKS = 9


@dataclass(frozen=True)
class Spec:
    """A tensor of a cache; strides in elements."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        last = sum((size - 1) * step for size, step in zip(self.shape, self.strides, strict=True))
        return (last + 1) * self.dtype.itemsize

    def view(self, raw: Tensor) -> Tensor:
        offset = GUARD // self.dtype.itemsize
        return raw.view(self.dtype).as_strided(self.shape, self.strides, offset)


def dense(dtype: torch.dtype, *shape: int) -> Spec:
    return Spec(dtype, shape, torch.empty(shape, device="meta").stride())


_BF16, _FP8, _U8 = torch.bfloat16, torch.float8_e4m3fn, torch.uint8

LAYOUTS: dict[str, tuple[int, list[Spec]]] = {  # block_dim and the tensors
    "K and V split": (1, [dense(_BF16, 2, 9, 4, 2, 8)] * 3),
    "blocks first": (0, [dense(_BF16, 9, 2, 4, 2, 8)] * 3),
    "MLA": (0, [dense(_BF16, 9, 16, 72)] * 2),
    "one cross-layer tensor": (0, [dense(_BF16, 9, 5, 2, 4, 2, 8)]),
    "fp8": (1, [dense(_FP8, 2, 9, 16, 3)] * 2),
    "odd rows": (0, [dense(_U8, 9, 4, 656), dense(_U8, 9, 13)]),
    "padded blocks": (0, [Spec(_BF16, (9, 4, 8), (37, 8, 1)), Spec(_U8, (9, 656), (1024, 1))]),
    "padded slabs": (1, [Spec(_FP8, (2, 9, 5), (100, 7, 1))]),
    "heads before tokens": (0, [Spec(_BF16, (9, 16, 2, 4), (128, 4, 64, 1))]),
    "K and V side by side": (1, [Spec(_BF16, (2, 9, 4, 8), (32, 64, 8, 1))]),
    "mixed": (0, [dense(_FP8, 9, 24), dense(torch.float32, 9, 3), dense(_U8, 9, 1)]),
    "blocks of one element": (0, [dense(_U8, 9), dense(torch.int64, 9)]),
}


class Cache:
    """The tensors of a layout of NUM_BLOCKS blocks, random bytes in them, between and around."""

    def __init__(self, name: str, seed: int, device: str = "cpu") -> None:
        self._block_dim, specs = LAYOUTS[name]
        generator = torch.Generator().manual_seed(seed)
        self.raws = [
            torch.randint(
                256, (-(-s.nbytes // 8) * 8 + 2 * GUARD,), dtype=_U8, generator=generator
            ).to(device)
            for s in specs
        ]
        self.tensors = [s.view(raw) for s, raw in zip(specs, self.raws, strict=True)]
        self.layout = PagedLayout(self.tensors, self._block_dim)

    def same_bytes(self, other: Cache) -> bool:
        """Compares all memory, guards and gaps too."""
        pairs = zip(self.raws, other.raws, strict=True)
        return all(torch.equal(mine.cpu(), theirs.cpu()) for mine, theirs in pairs)

    def store(self, block: int, slot: Tensor) -> None:
        """Writes the bytes of the block to the slot, one slab after another."""
        slot.copy_(torch.cat([view.flatten() for view in self._slabs(block)]))

    def load(self, slot: Tensor, block: int) -> None:
        views = self._slabs(block)
        parts = slot.split([view.numel() for view in views])
        for view, part in zip(views, parts, strict=True):
            view.copy_(part.view(view.shape))

    def _slabs(self, block: int) -> list[Tensor]:
        """The bytes of the block in each slab, in the order in which they lie in memory."""
        views = []
        for tensor in self.tensors:
            for index in itertools.product(*map(range, tensor.shape[: self._block_dim])):
                view = tensor[(*index, block)].unsqueeze(-1).view(torch.uint8)
                order = sorted(range(view.dim()), key=view.stride, reverse=True)
                views.append(view.permute(order))
        return views


def check_round_trip(
    name: str, blocks_per_page: int, device: str = "cpu", make: Any = OffloadHandler
) -> list[Result]:
    """Stores blocks and loads them into other blocks; checks all bytes of cache and pages.

    Args:
        make: the class of the handler.

    Returns:
        list[Result]: of the store and the load.
    """
    cache, expected = Cache(name, 0, device), Cache(name, 0)
    host = HostPool(cache.layout, 5, blocks_per_page)
    host.pages.fill_(0xA5)
    pages = host.pages.clone()
    blocks, targets = [7, 0, 3], [1, 8, 2]
    page_ids = [4, 1, 2][: 3 if blocks_per_page == 1 else 2]
    first = 0 if blocks_per_page == 1 else 2
    with make(cache.layout, host) as handler:
        store = handler.store(gpu_block_ids=blocks, page_ids=page_ids, first_slot=first)
        store.synchronize()
        load = handler.load(page_ids=page_ids, gpu_block_ids=targets, first_slot=first)
        load.synchronize()
        for j, (block, target) in enumerate(zip(blocks, targets, strict=True)):
            page, slot = divmod(first + j, blocks_per_page)
            expected.store(block, pages[page_ids[page], slot])
            expected.load(pages[page_ids[page], slot], target)
        assert torch.equal(host.pages, pages)
        results: list[Result] = handler.poll()
    assert cache.same_bytes(expected)
    assert not cache.same_bytes(Cache(name, 0))
    return results
