"""Repeats a failed transfer with plain copies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from torch_kvswap.host_pool.pool import HostPool
from torch_kvswap.integrations.vllm.layout import Place
from torch_kvswap.layout import PagedLayout
from torch_kvswap.results import Direction

# Blocks that are kept as they are, outside of their pages: uint8, by page and slot.
Kept: TypeAlias = dict[tuple[int, int], Tensor]


def copy_again(
    layouts: Sequence[PagedLayout],
    pools: Sequence[HostPool],
    direction: Direction,
    places: Sequence[Place],
    kept: Kept,
    has_run: bool,
) -> None:
    """Copies block by block and tensor by tensor with torch, without the handler. Blocks the host
    until the copies have ended.

    Stores into pages that are encoded or have digests go to memory beside them, to `kept`: a block
    that was rejected does not fit into its slot, and no digest is made here. Loads take a block
    from there first. Other blocks of pages with digests are not loaded, because nothing here tells
    whether they are what was stored.

    Args:
        layouts (Sequence[PagedLayout]): the groups, with one slab per tensor.
        pools (Sequence[HostPool]): their pages.
        direction (str): "store" or "load".
        places (Sequence[Place]): what to copy.
        kept (Kept): blocks beside such pages; a store adds its own when it ends well.
        has_run (bool): the transfer has run to its end and only rejected blocks. It has waited for
            the kernels that used them before, so the copies start at once, on a stream of their
            own. If it failed, they wait for the current stream, and thus for these kernels.

    Raises:
        Exception: a block cannot be copied.
    """
    stored: Kept = {}
    rows = [_row(pools[place.group], place, direction, kept, stored) for place in places]
    device = layouts[0].device
    if device.type == "cpu":
        _copy(layouts, direction, places, rows)
    else:
        stream = torch.cuda.Stream(device)
        if not has_run:
            stream.wait_stream(torch.cuda.current_stream(device))
        try:
            with torch.cuda.stream(stream):
                _copy(layouts, direction, places, rows)
        finally:
            stream.synchronize()  # the copies use `rows`
    kept.update(stored)


def _row(pool: HostPool, place: Place, direction: Direction, kept: Kept, stored: Kept) -> Tensor:
    """The bytes of a block on the host, or memory for them, which is added to `stored`."""
    key = place.page, place.slot
    if pool.encoding == "raw" and pool.verify == "off":
        return pool.pages[key]
    if direction == "store":
        pool._forget_block(*key)  # an older one, which nobody must read
        stored[key] = torch.empty(pool.layout.block_bytes, dtype=torch.uint8, device="cpu")
        return stored[key]
    found = kept.get(key)
    if found is not None:
        return found
    if pool.verify != "off":
        raise RuntimeError(f"page {place.page} has digests, which plain copies do not compare")
    return pool.read_block(*key)


def _copy(
    layouts: Sequence[PagedLayout],
    direction: Direction,
    places: Sequence[Place],
    rows: Sequence[Tensor],
) -> None:
    for place, row in zip(places, rows, strict=True):
        begin = 0
        for tensor in layouts[place.group].tensors:
            on_gpu = tensor[place.block].view(torch.uint8)
            on_host = row[begin : begin + len(on_gpu)]
            target, source = (on_host, on_gpu) if direction == "store" else (on_gpu, on_host)
            target.copy_(source, non_blocking=True)
            begin += len(on_gpu)
