"""Finds out which encoding of host pages suits the contents of a cache."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from torch_kvswap._native.arguments import Int64Array, count_of, kind_of
from torch_kvswap._native.ids import Ids
from torch_kvswap._native.loader import native
from torch_kvswap.devices.blocks import as_words
from torch_kvswap.encoding.slot import WIDTHS, Encoding, EncodingName
from torch_kvswap.layout import PagedLayout, address_of

# A width that rejects more of the blocks than this is not recommended.
MOST_REJECTED = 0.01


@dataclass(frozen=True)
class EncodingRecommendation:
    """The result of recommend_encoding().

    Attributes:
        encoding (str): what to pass to HostPool.
        bits_per_value (float | None): what to pass to HostPool; None for "raw".
        escapes (tuple[int, ...]): for each block, how many of its values do not fit into four bits
            of exponent and are kept apart. Empty if such blocks cannot be encoded.
        rejected (Mapping[float, float]): for each possible bits_per_value, the share of the blocks
            that slots of this size reject.
        text (str): the reason, in a sentence.
    """

    encoding: EncodingName
    bits_per_value: float | None
    escapes: tuple[int, ...]
    rejected: Mapping[float, float]
    text: str

    def __str__(self) -> str:
        return self.text


def recommend_encoding(layout: PagedLayout, sample_block_ids: Ids) -> EncodingRecommendation:
    """Recommends an encoding and a size of slots for a HostPool, from blocks of a cache.

    Recommends the smallest slots that reject at most 1 % of the blocks. Copies the blocks to the
    host one after another, in the order of the current stream. Choose blocks that requests have
    filled: unused blocks are zeros, which fit into any slot.

    Args:
        layout (PagedLayout): the cache.
        sample_block_ids: 1-D list, numpy array or CPU tensor of integers; some hundred blocks of
            different requests.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: there are no blocks to look at.
        IndexError: the cache has no such block.
    """
    if not isinstance(layout, PagedLayout):
        raise TypeError(f"layout is {kind_of(layout)}; pass a PagedLayout")
    blocks = native.read_ids("sample_block_ids", sample_block_ids)
    if not blocks:
        raise ValueError("sample_block_ids is empty; name blocks that requests have filled")
    for position, block in enumerate(blocks):
        if not 0 <= block < layout.num_blocks:
            raise IndexError(
                f"sample_block_ids[{position}] is {block}; the cache has blocks 0 to "
                f"{layout.num_blocks - 1}"
            )
    room: dict[float, int] = {}
    for width in WIDTHS:
        encoding = Encoding(width)
        try:
            encoding.slot_bytes(layout)
        except ValueError as error:
            problem = str(error)
        else:
            room[width] = native.SlotFormat(layout.sizes, encoding.width_eighths).max_escapes
    if not room:
        return EncodingRecommendation("raw", None, (), {}, f"raw: {problem}")
    layout._check_unmoved()
    escapes = tuple(_escapes(layout, blocks))
    rejected = {
        width: sum(count > fit for count in escapes) / len(escapes) for width, fit in room.items()
    }
    best = next((width for width in room if rejected[width] <= MOST_REJECTED), None)
    shares = ", ".join(f"with {width:g} bits {share:.1%}" for width, share in rejected.items())
    mean = sum(escapes) / len(escapes)
    values = layout.block_bytes // 2
    return EncodingRecommendation(
        "raw" if best is None else "lossless",
        best,
        escapes,
        rejected,
        f"{'raw' if best is None else f'lossless with {best:g} bits per value'}; rejected of "
        f"{count_of(len(escapes), 'block')}: {shares}; a block of {values} values has {mean:.1f} "
        f"escapes on average and {max(escapes)} at most",
    )


def _escapes(layout: PagedLayout, blocks: Iterable[int]) -> Iterator[int]:
    """The escapes of each block, which is copied to the host."""
    sizes = np.ascontiguousarray(layout.sizes, np.int64)
    # In the order of the memory, whatever the order of a block's dimensions is. Views of bytes may
    # begin at an odd address.
    words = (torch.uint8 if one.itemsize == 1 else torch.int16 for one in layout.tensors)
    both = zip(layout.tensors, words, strict=True)
    views = [as_words(one, layout.block_dim, word) for one, word in both]
    for block in blocks:
        parts = [view.select(layout.block_dim, block).cpu().contiguous() for view in views]
        bases: Int64Array = np.fromiter(_addresses(parts), np.int64, len(sizes))
        yield native.count_escapes(bases, sizes)


def _addresses(parts: list[torch.Tensor]) -> Iterator[int]:
    """The address of each slab's block in contiguous tensors [..., words of a block]."""
    for part in parts:
        nbytes = part.shape[-1] * part.element_size()
        first = address_of(part)
        yield from range(first, first + part.numel() * part.element_size(), nbytes)
