"""vLLM's registered KV caches as layouts, and its transfers as lists of ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from torch_kvswap._native.arguments import Int64Array
from torch_kvswap.layout import PagedLayout


class Move(NamedTuple):
    """The ids of a transfer, one entry per layout: arguments of OffloadHandler.store().

    Attributes:
        blocks (list[np.ndarray]): int64, GPU blocks.
        pages (list[np.ndarray]): int64, host pages.
        first_slots (list[int]): slot of the first block in the first page.

    The `slots` of its methods are the blocks per page.
    """

    blocks: list[Int64Array]
    pages: list[Int64Array]
    first_slots: list[int]

    def places(self, slots: int) -> list[tuple[int, int]]:
        """The block and the page of each copy, in the order of Result.rejected."""
        return [
            (block, int(pages[place // slots]))
            for blocks, pages, first in zip(*self, strict=True)
            for place, block in enumerate(blocks.tolist(), first)
        ]

    @classmethod
    def joined(cls, moves: Sequence[Move], slots: int) -> Move:
        """One transfer of several.

        Raises:
            ValueError: one of several is not of whole pages: blocks of the next would go to its
                last page.
        """
        if len(moves) == 1:
            return moves[0]
        for index, move in enumerate(moves):
            for blocks, pages, first in zip(*move, strict=True):
                if first or len(blocks) != len(pages) * slots:
                    raise ValueError(
                        f"transfers can be joined only if they are of whole pages of {slots} "
                        f"blocks, but [{index}] has {len(blocks)} blocks from slot {first} of "
                        f"{len(pages)} pages"
                    )
        all_blocks, all_pages = (
            [np.concatenate(of_group) for of_group in zip(*ids, strict=True)]
            for ids in ([move.blocks for move in moves], [move.pages for move in moves])
        )
        return cls(all_blocks, all_pages, moves[0].first_slots)


def group_layouts(
    kv_caches: Any, layers: Sequence[Sequence[str]], dtype: torch.dtype | None = None
) -> list[PagedLayout | None]:
    """Makes a layout for each group of layers; None for a group without layers in this worker.

    Layers of a group that share a tensor become one slab. Only the bytes of a block that are in use
    are part of the layout. With pipeline parallelism a worker has some of the layers: the last
    stage, for example, has all layers of a draft model.

    Args:
        kv_caches: vLLM's CanonicalKVCaches, with int8 tensors [blocks, bytes].
        layers (Sequence[Sequence[str]]): names of the layers of each group.
        dtype (torch.dtype | None): the type of the keys and values, if it matters.
    """
    layouts: list[PagedLayout | None] = []
    for refs, names in zip(kv_caches.group_data_refs, layers, strict=True):
        if len(refs) != len(names):  # a block has all layers
            names = [f"{names[0]} to {names[-1]}"]
        name_of, sizes = dict[int, str](), dict[int, int]()
        for ref, name in zip(refs, names, strict=True):
            name_of[ref.tensor_idx] = name
            sizes[ref.tensor_idx] = max(ref.page_size_bytes, sizes.get(ref.tensor_idx, 0))
        tensors = {
            name: kv_caches.tensors[index].tensor[:, : sizes[index]]
            for index, name in name_of.items()
        }
        layouts.append(PagedLayout(tensors, 0, dtype=dtype) if tensors else None)
    return layouts


def read_move(gpu: Any, host: Any, has_layers: Sequence[bool], blocks_per_page: int) -> Move:
    """Converts a vLLM transfer to lists of ids.

    The first chunk of a group may be used from its middle on, the last chunk in part. vLLM sends
    the same transfer to all workers; the ids of groups without layers are left out.

    Args:
        gpu: a GPULoadStoreSpec.
        host: the manager's LoadStoreSpec, with one page per chunk in `block_ids`.
        has_layers (Sequence[bool]): which groups have layers in this worker.
        blocks_per_page (int): GPU blocks per chunk.

    Raises:
        ValueError: gpu and host do not fit together.
    """
    block_ids = np.asarray(gpu.block_ids, np.int64)
    page_ids = np.asarray(host.block_ids, np.int64)
    blocks, pages, first_slots = [], [], []
    block, page = 0, 0
    for size, index, is_here in zip(gpu.group_sizes, gpu.block_indices, has_layers, strict=True):
        first = index % blocks_per_page if size else 0
        last_page = page + -(-(first + size) // blocks_per_page)
        if is_here:
            blocks.append(block_ids[block : block + size])
            pages.append(page_ids[page:last_page])
            first_slots.append(first)
        block, page = block + size, last_page
    if (block, page) != (len(block_ids), len(page_ids)):
        raise ValueError(
            f"the transfer has {len(block_ids)} GPU blocks and {len(page_ids)} pages, but its "
            f"groups of {list(gpu.group_sizes)} blocks starting at {list(gpu.block_indices)} need "
            f"{block} and {page}"
        )
    return Move(blocks, pages, first_slots)
