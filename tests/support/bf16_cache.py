"""Paged caches of bf16 values whose blocks fit, or do not fit, into encoded slots."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from bf16_blocks import Values, make_block, random_bits
from torch import Tensor

from torch_kvswap import PagedLayout

SIZES = [4096, 4096, 2048, 2048]  # of a block in each slab
BLOCK_BYTES = sum(SIZES)


class Bf16Cache:
    """Two layers with a K and a V slab each, and what their blocks are made of.

    Attributes:
        layout (PagedLayout): the cache.
    """

    def __init__(self, num_blocks: int = 16, device: str = "cpu") -> None:
        self.tensors = [
            torch.zeros(2, num_blocks, 16, heads * 64, dtype=torch.bfloat16, device=device)
            for heads in (2, 1)
        ]
        self.layout = PagedLayout(self.tensors, block_dim=1)

    def fill(self, block: int, kind: str | None, seed: int = 0) -> None:
        """Fills a block with values of a kind; None is random bits, which fit into no slot."""
        parts = random_bits(SIZES, seed) if kind is None else make_block(kind, SIZES, seed)
        self.write(block, parts)

    def write(self, block: int, parts: Sequence[Values]) -> None:
        """Writes the values of each slab."""
        for slab, part in zip(self.slabs(block), parts, strict=True):
            slab.copy_(torch.from_numpy(part.view(np.int16)).view(torch.bfloat16).view_as(slab))

    def slabs(self, block: int) -> list[Tensor]:
        return [tensor[part, block] for tensor in self.tensors for part in range(2)]

    def bytes_of(self, block: int) -> bytes:
        """The bytes of a block, its slabs in a row."""
        return b"".join(
            slab.cpu().contiguous().view(torch.uint8).numpy().tobytes()
            for slab in self.slabs(block)
        )
