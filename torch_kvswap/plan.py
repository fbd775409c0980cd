"""Which bytes a transfer copies: block ids and two layouts make lists of addresses and sizes."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from torch_kvswap import ops
from torch_kvswap.layout import Int64Array, Planes

if TYPE_CHECKING:
    from torch_kvswap.host_memory import HostPool

Ids = Sequence[int] | npt.NDArray[Any] | Tensor


@dataclass(frozen=True)
class CopyPlan:
    """Fragments to copy: int64 CPU tensors [fragments] of addresses and byte counts, block after
    block. nbytes: their sum. blocks, pages: int64 arrays of the GPU blocks and host pages that it
    touches. Holds addresses only; the memory must outlive the copy."""

    src_ptrs: Tensor
    dst_ptrs: Tensor
    sizes: Tensor
    nbytes: int
    blocks: Int64Array
    pages: Int64Array


def plan_store(
    gpu: Planes, host: HostPool, gpu_block_ids: Ids, page_ids: Ids, first_block: int = 0
) -> CopyPlan:
    """Copies block gpu_block_ids[j] to page page_ids[(first_block + j) // blocks_per_page], slot
    (first_block + j) % blocks_per_page of it.

    Ids: lists, numpy arrays or CPU tensors, 1-D, of any integer type; they are copied here. Raises
    IndexError for an id out of range, TypeError for a type that is no integer, ValueError for the
    rest, such as a page that occurs twice.
    """
    blocks, pages = _checked_ids(gpu, host, gpu_block_ids, page_ids, first_block)
    _refuse_duplicates("page_ids", pages)
    slots = _host_blocks(host, pages, first_block, len(blocks))
    return CopyPlan(*_fragments(gpu, blocks, host.layout, slots), blocks, pages)


def plan_load(
    gpu: Planes, host: HostPool, gpu_block_ids: Ids, page_ids: Ids, first_block: int = 0
) -> CopyPlan:
    """plan_store the other way round; here no GPU block may occur twice, while a page may."""
    blocks, pages = _checked_ids(gpu, host, gpu_block_ids, page_ids, first_block)
    _refuse_duplicates("gpu_block_ids", blocks)
    slots = _host_blocks(host, pages, first_block, len(blocks))
    return CopyPlan(*_fragments(host.layout, slots, gpu, blocks), blocks, pages)


def _fragments(
    src: Planes, src_blocks: Int64Array, dst: Planes, dst_blocks: Int64Array
) -> tuple[Tensor, Tensor, Tensor, int]:
    sizes = torch.from_numpy(np.tile(src.sizes, len(src_blocks)))
    nbytes = src.block_bytes * len(src_blocks)
    return _addresses(src, src_blocks), _addresses(dst, dst_blocks), sizes, nbytes


def _addresses(layout: Planes, blocks: Int64Array) -> Tensor:
    return torch.from_numpy((layout.bases + np.multiply.outer(blocks, layout.strides)).reshape(-1))


def _host_blocks(host: HostPool, pages: Int64Array, first_block: int, count: int) -> Int64Array:
    skip = first_block if count else 0
    ids = ops.expand_block_ids(torch.from_numpy(pages), host.blocks_per_page, skip, count)
    blocks: Int64Array = ids.numpy()
    return blocks


def _checked_ids(
    gpu: Planes, host: HostPool, gpu_block_ids: Ids, page_ids: Ids, first_block: int
) -> tuple[Int64Array, Int64Array]:
    blocks = _ids("gpu_block_ids", gpu_block_ids, gpu.num_blocks, "GPU blocks")
    pages = _ids("page_ids", page_ids, host.num_pages, "host pages")
    per_page, first_block = host.blocks_per_page, operator.index(first_block)
    if not 0 <= first_block < per_page:
        raise ValueError(
            f"first_block={first_block} is outside of the first page, whose blocks are "
            f"0 to {per_page - 1}"
        )
    needed = -(-(first_block + len(blocks)) // per_page) if len(blocks) else 0
    if len(pages) != needed:
        raise ValueError(
            f"{len(blocks)} blocks from first_block={first_block} on need {needed} pages of "
            f"{per_page} blocks, page_ids has {len(pages)}"
        )
    return blocks, pages


def _ids(name: str, ids: Ids, limit: int, noun: str) -> Int64Array:
    """A checked copy of the ids, int64."""
    if isinstance(ids, Tensor):
        if ids.device.type != "cpu":
            raise ValueError(
                f"{name} is on {ids.device}, but addresses are made on the host; pass {name}.cpu()"
            )
        if ids.is_floating_point() or ids.is_complex():  # numpy lacks some of these types
            raise TypeError(f"{name} is of {ids.dtype}; ids must be integers")
        ids = ids.numpy()
    if not isinstance(ids, Sequence | np.ndarray):
        raise TypeError(f"{name} is a {type(ids).__name__}; pass a list, numpy array or CPU tensor")
    try:
        array = np.asarray(ids)
    except ValueError as error:
        raise ValueError(f"{name} must have one dimension: {error}") from error
    if array.ndim != 1:
        raise ValueError(f"{name} has shape {list(array.shape)}; it must have one dimension")
    if array.size == 0 and not isinstance(ids, np.ndarray):
        return np.empty(0, np.int64)
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name} is of {array.dtype}; ids must be integers")
    outside = np.flatnonzero((array < 0) | (array >= limit))
    if outside.size:
        position = int(outside[0])
        raise IndexError(
            f"{name}[{position}] is {array[position]}; there are {limit} {noun}, 0 to {limit - 1}"
        )
    return array.astype(np.int64)  # always a copy: torch takes no read-only or reversed array


def _refuse_duplicates(name: str, ids: Int64Array) -> None:
    order = np.argsort(ids, kind="stable")
    again = np.flatnonzero(ids[order[1:]] == ids[order[:-1]])
    if again.size:
        second = again[np.argmin(order[again + 1])]
        raise ValueError(
            f"{name}[{order[second]}] and {name}[{order[second + 1]}] are both "
            f"{ids[order[second]]}: it would be written twice; pass each destination once"
        )
