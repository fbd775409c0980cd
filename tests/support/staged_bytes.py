"""Bytes of caches for staged copies, and what a store and a load of them have to leave."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torch_kvswap.offload.handler import OffloadHandler


def numbers(*shape: int) -> Tensor:
    count = math.prod(shape)
    words = torch.randint(-(1 << 63), (1 << 63) - 1, (-(-count // 8),))  # 8 bytes for the time of 1
    return words.view(torch.uint8)[:count].view(shape)


def expect(
    handler: OffloadHandler, before: list[Tensor], blocks: list[int], pages: list[int]
) -> None:
    """Stores blocks, loads them into those that follow, and compares all memory."""
    layout, pool = handler.layouts[0], handler.pools[0]
    count, per_page = layout.num_blocks, pool.blocks_per_page
    pool.pages.fill_(0xA5)
    handler.synchronize(handler.store(gpu_block_ids=blocks, page_ids=pages))
    slots = pool.pages.view(-1, layout.block_bytes)
    wanted = torch.full_like(slots, 0xA5)
    numbers_of_slots = [page * per_page + i for page in pages for i in range(per_page)]
    for block, slot in zip(blocks, numbers_of_slots, strict=True):
        wanted[slot] = torch.cat([tensor[block].flatten() for tensor in before])
    assert torch.equal(slots, wanted)
    targets = [(block + 1) % count for block in blocks]
    handler.synchronize(handler.load(page_ids=pages, gpu_block_ids=targets))
    for tensor, old in zip(layout.tensors, before, strict=True):
        new = old.clone()
        new[targets] = old[blocks]
        assert torch.equal(tensor, new)
