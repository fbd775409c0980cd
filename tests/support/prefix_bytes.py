"""A prefix cache whose blocks hold their numbers."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_kvswap import HostPool, PagedLayout, PrefixCache

BLOCKS, PAGES = 16, 6


def make(per_page: int = 1, pages: int = PAGES) -> tuple[PrefixCache, Tensor]:
    """A prefix cache, and a tensor of its cache. Block i is full of i."""
    numbers = torch.arange(BLOCKS, dtype=torch.float32)[:, None].expand(BLOCKS, 5)
    layout = PagedLayout([numbers.contiguous(), -numbers])
    return PrefixCache(layout, HostPool(layout, pages, per_page)), layout.tensors[0]
