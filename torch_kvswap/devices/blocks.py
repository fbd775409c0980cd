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


class GroupTensors:
    """The tensors of a paged cache and its host slots, as words of one size.

    A word has the largest number of bytes, at most 8, that divides all sizes and distances. The
    methods work on the current stream and do not wait for it.

    Args:
        tensors (Sequence[Tensor]): the tensors of the cache; dimension `block_dim` counts blocks.
        block_dim (int): that dimension.
        tensor_of_slab: index of each slab's tensor, ascending.
        host (Tensor): uint8 [slots, bytes of a slot]; the slabs of a block are in a row from the
            beginning of its slot on.
        is_pinned (bool): whether the host memory is pinned, so that copies are asynchronous.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        block_dim: int,
        tensor_of_slab: Int64Array,
        host: Tensor,
        is_pinned: bool,
    ) -> None:
        self.is_pinned = is_pinned
        self._block_dim = block_dim
        self._tensor_of_slab = tensor_of_slab
        self._word_bytes = math.gcd(
            8, host.stride(0), *map(alignment, tensors, [block_dim] * len(tensors))
        )
        word = WORDS[self._word_bytes]
        self._views = [as_words(tensor, block_dim, word) for tensor in tensors]
        self._host = host.view(word)
        # Words of a block in the tensors before each one, and in all of them.
        widths = [view.numel() // view.shape[block_dim] for view in self._views]
        self._offsets = [0, *np.cumsum(widths).tolist()]

    def slot_bytes_of(self, first_slab: int, last_slab: int) -> int:
        """Bytes of a block in these slabs, which cover whole tensors."""
        first, last = self._tensors_of(first_slab, last_slab)
        return int(self._offsets[last] - self._offsets[first]) * self._word_bytes

    def store(
        self, slabs: tuple[int, int], slots: Int64Array, ids: Tensor, staging: Tensor
    ) -> None:
        """Copies blocks to host slots.

        Args:
            slabs: the first slab and the one after the last.
            slots: the slot of each block, ascending.
            ids (Tensor): int64 [slots], the blocks, on the device.
            staging (Tensor): uint8 memory on the device for slot_bytes_of(*slabs) bytes a block.
        """
        first, last = self._tensors_of(*slabs)
        rows = self._rows(first, last, len(slots), staging)
        for place, view in self._places(first, last, rows):
            place.copy_(view.index_select(self._block_dim, ids))
        for host, part in self._runs(first, last, slots, rows):
            host.copy_(part, non_blocking=self.is_pinned)

    def load(self, slabs: tuple[int, int], slots: Int64Array, ids: Tensor, staging: Tensor) -> None:
        """Copies host slots to blocks: store() in the other direction."""
        first, last = self._tensors_of(*slabs)
        rows = self._rows(first, last, len(slots), staging)
        for host, part in self._runs(first, last, slots, rows):
            part.copy_(host, non_blocking=self.is_pinned)
        for place, view in self._places(first, last, rows):
            view.index_copy_(self._block_dim, ids, place)

    def _tensors_of(self, first_slab: int, last_slab: int) -> tuple[int, int]:
        of_slab = self._tensor_of_slab
        return int(of_slab[first_slab]), int(of_slab[last_slab - 1]) + 1

    def _rows(self, first: int, last: int, count: int, staging: Tensor) -> Tensor:
        """The staging memory with a row of words for each block."""
        width = self._offsets[last] - self._offsets[first]
        words = staging[: count * width * self._word_bytes].view(self._host.dtype)
        return words.view(count, width)

    def _places(self, first: int, last: int, rows: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields each tensor's part of the rows, in the shape of its blocks, and the tensor."""
        for number in range(first, last):
            view = self._views[number]
            begin, end = (self._offsets[number + i] - self._offsets[first] for i in range(2))
            shape = [*view.shape[: self._block_dim], view.shape[-1]]
            place = rows[:, begin:end].view(len(rows), *shape)
            yield place.movedim(0, self._block_dim), view

    def _runs(
        self, first: int, last: int, slots: Int64Array, rows: Tensor
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields contiguous host memory and its part of the rows. Adjacent slots are one piece."""
        begin, end = self._offsets[first], self._offsets[last]
        is_whole = end - begin == self._host.shape[1]
        starts = np.flatnonzero(np.diff(slots) != 1) + 1 if is_whole else range(1, len(slots))
        edges = [0, *starts, len(slots)]
        for at, until in pairwise(edges):
            slot = int(slots[at])
            yield self._host[slot : slot + until - at, begin:end], rows[at:until]


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
