"""The KV caches that vLLM registers, as layouts, and its transfers, as lists of ids."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from torch_kvswap.layout import Int64Array, PagedLayout


class Move(NamedTuple):
    """What a transfer copies, for each group: GPU blocks, pages, and the slot of the first block in
    its page. Arguments of `OffloadHandler.store`."""

    blocks: list[Int64Array]
    pages: list[Int64Array]
    first_blocks: list[int]


def group_layouts(kv_caches: Any) -> list[PagedLayout]:
    """A layout for each group of CanonicalKVCaches: of its tensors, int8 [blocks, bytes], the bytes
    that are used. Layers of a group that share a tensor are one plane."""
    layouts = []
    for refs in kv_caches.group_data_refs:
        sizes: dict[int, int] = {}
        for ref in refs:
            sizes[ref.tensor_idx] = max(ref.page_size_bytes, sizes.get(ref.tensor_idx, 0))
        tensors = [kv_caches.tensors[index].tensor[:, :size] for index, size in sizes.items()]
        layouts.append(PagedLayout(tensors))
    return layouts


def read_move(gpu: Any, host: Any, groups: int, blocks_per_page: int) -> Move:
    """gpu: a GPULoadStoreSpec. host: what the manager made of it, with a page for each chunk in
    `block_ids`. The first chunk of a group may be used from its middle on, the last one in part.
    Raises ValueError when the two do not fit together."""
    block_ids = np.asarray(gpu.block_ids, np.int64)
    page_ids = np.asarray(host.block_ids, np.int64)
    if len(gpu.group_sizes) != groups:
        raise ValueError(f"a transfer of {len(gpu.group_sizes)} groups, the cache has {groups}")
    blocks, pages, first_blocks = [], [], []
    block, page = 0, 0
    for size, index in zip(gpu.group_sizes, gpu.block_indices, strict=True):
        first = index % blocks_per_page if size else 0
        last_page = page + -(-(first + size) // blocks_per_page)
        blocks.append(block_ids[block : block + size])
        pages.append(page_ids[page:last_page])
        first_blocks.append(first)
        block, page = block + size, last_page
    if (block, page) != (len(block_ids), len(page_ids)):
        raise ValueError(
            f"a transfer of {len(block_ids)} GPU blocks and {len(page_ids)} pages, of which its "
            f"groups of {list(gpu.group_sizes)} blocks from {list(gpu.block_indices)} on take "
            f"{block} and {page}"
        )
    return Move(blocks, pages, first_blocks)
