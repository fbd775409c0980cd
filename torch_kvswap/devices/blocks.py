"""Copies of blocks with operations that torch has on every device."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from torch_kvswap._native.arguments import Int64Array

WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Blocks are copied in pieces of this many bytes at most, or of one block.
STAGING_BYTES = 32 << 20


class GroupTensors:
    """The tensors of a paged cache and its host slots, as words of one size.

    A word has the largest number of bytes, at most 8, that divides all sizes and distances. The
    methods work on the current stream and do not wait for it if the host memory is pinned.

    Args:
        tensors (Sequence[Tensor]): the tensors of the cache; dimension `block_dim` counts blocks.
        block_dim (int): that dimension.
        host (Tensor): uint8 [slots, bytes of a slot]; a slot begins with the block's bytes in each
            tensor, one after another.
        is_pinned (bool): whether PyTorch has pinned the host memory, so that copies are
            asynchronous.
    """

    def __init__(
        self, tensors: Sequence[Tensor], block_dim: int, host: Tensor, is_pinned: bool
    ) -> None:
        self._is_pinned = is_pinned
        self._block_dim = block_dim
        self._word_bytes = math.gcd(
            8, host.stride(0), *map(alignment, tensors, [block_dim] * len(tensors))
        )
        word = WORDS[self._word_bytes]
        self._views = [as_words(tensor, block_dim, word) for tensor in tensors]
        self._host = host.view(word)
        # Words of a block in the tensors before each one, and in all of them.
        widths = [view.numel() // view.shape[block_dim] for view in self._views]
        self._offsets = [0, *np.cumsum(widths).tolist()]

    def store(self, slots: Int64Array, ids: Tensor) -> None:
        """Copies blocks to host slots.

        Args:
            slots: the slot of each block, ascending.
            ids (Tensor): int64 [slots], the blocks, on the device.
        """
        for piece, rows in self._pieces(len(slots)):
            for place, view in self._places(rows):
                place.copy_(view.index_select(self._block_dim, ids[piece]))
            for host, part in self._runs(slots[piece], rows):
                host.copy_(part, non_blocking=self._is_pinned)

    def load(self, slots: Int64Array, ids: Tensor) -> None:
        """Copies host slots to blocks: store() in the other direction."""
        for piece, rows in self._pieces(len(slots)):
            for host, part in self._runs(slots[piece], rows):
                part.copy_(host, non_blocking=self._is_pinned)
            for place, view in self._places(rows):
                view.index_copy_(self._block_dim, ids[piece], place)

    def _pieces(self, count: int) -> Iterator[tuple[slice, Tensor]]:
        """Divides blocks into pieces. Yields each piece, and memory on the device with a row of
        words for each of its blocks.

        All pieces use the same memory, which was allocated on the current stream. So the stream's
        order makes it safe to write it again, and to free it.
        """
        words = self._offsets[-1]
        step = max(1, STAGING_BYTES // (words * self._word_bytes))
        memory = self._views[0].new_empty(min(step, count), words)
        for begin in range(0, count, step):
            end = min(begin + step, count)
            yield slice(begin, end), memory[: end - begin]

    def _places(self, rows: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields each tensor's part of the rows, in the shape of its blocks, and the tensor."""
        for view, (begin, end) in zip(self._views, pairwise(self._offsets), strict=True):
            shape = [*view.shape[: self._block_dim], view.shape[-1]]
            place = rows[:, begin:end].view(len(rows), *shape)
            yield place.movedim(0, self._block_dim), view

    def _runs(self, slots: Int64Array, rows: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields contiguous host memory and its part of the rows. Adjacent slots are one piece."""
        words = rows.shape[1]
        fills_slots = words == self._host.shape[1]
        starts = np.flatnonzero(np.diff(slots) != 1) + 1 if fills_slots else range(1, len(slots))
        for begin, end in pairwise([0, *starts, len(slots)]):
            slot = int(slots[begin])
            yield self._host[slot : slot + end - begin, :words], rows[begin:end]


def alignment(tensor: Tensor, block_dim: int) -> int:
    """The largest number of bytes that divides the blocks' addresses, distances and sizes."""
    strides = [tensor.stride(d) for d in range(block_dim + 1) if tensor.shape[d] > 1]
    numel = math.prod(tensor.shape[block_dim + 1 :])
    elements = math.gcd(tensor.storage_offset(), numel, *strides)
    return math.gcd(elements * tensor.element_size(), tensor.data_ptr())


def as_words(tensor: Tensor, block_dim: int, word: torch.dtype) -> Tensor:
    """The tensor as [..., blocks, words of a block], on the same memory."""
    numel = math.prod(tensor.shape[block_dim + 1 :])
    shape = [*tensor.shape[: block_dim + 1], numel]
    strides = [
        tensor.stride(d) if tensor.shape[d] > 1 else numel  # unused; numel keeps it divisible
        for d in range(block_dim + 1)
    ]
    blocks = tensor.detach().as_strided(shape, [*strides, 1], tensor.storage_offset())
    return blocks.view(torch.uint8).view(word)


def send_ids(ids: Tensor, device: torch.device) -> Tensor:
    """The ids of a CPU tensor on a device, in the order of its current stream.

    Waits for that stream only if PyTorch cannot pin memory for the device. PyTorch keeps pinned
    memory until the copies from it have ended.
    """
    if device.type == "cpu" or not can_pin(device.type):
        return ids.to(device)
    return ids.pin_memory().to(device, non_blocking=True)


@cache
def can_pin(device_type: str) -> bool:
    """Whether PyTorch pins memory for devices of this type."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or accelerator.type != device_type:
        return False
    try:
        return torch.empty(1, device="cpu", pin_memory=True).is_pinned()
    except RuntimeError:
        return False
