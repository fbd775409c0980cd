"""Kernels of the ops for devices that only PyTorch drives, made of its operations.

These run on the current stream of each tensor's device. The checks are those of the native kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_kvswap._native.loader import ops
from torch_kvswap.devices.blocks import STAGING_BYTES, WORDS, alignment, as_words, send_ids
from torch_kvswap.devices.kind import is_native

# Of dense tensors with memory. Not CompositeExplicitAutograd, which includes sparse tensors.
DISPATCH_KEYS = ["HPU", "IPU", "MAIA", "MPS", "MTIA", "PrivateUse1", "VE", "XPU"]
if not is_native("cuda"):
    DISPATCH_KEYS.append("CUDA")  # which is also the key of AMD's GPUs

_ops: Any = ops.torch_kvswap


def swap_blocks(src: Tensor, dst: Tensor, block_size_in_bytes: int, block_mapping: Tensor) -> None:
    """The kernel of the op of this name."""
    _check(_ops._check_swap_blocks, src, dst, block_size_in_bytes, block_mapping)
    _copy_blocks([src], [dst], block_mapping[:, 0], block_mapping[:, 1])


def swap_kv_blocks(
    src: Sequence[Tensor], dst: Sequence[Tensor], src_block_ids: Tensor, dst_block_ids: Tensor
) -> None:
    """The kernel of the op of this name."""
    _check(_ops._check_swap_kv_blocks, src, dst, src_block_ids, dst_block_ids)
    _copy_blocks(src, dst, src_block_ids, dst_block_ids)


def expand_block_ids(
    block_ids: Tensor, block_size_factor: int, skip_count: int = 0, count: int | None = None
) -> Tensor:
    """The kernel of the op of this name."""
    operands = block_ids, block_size_factor, skip_count, count
    outputs = _check(_ops._check_expand_block_ids, *operands, None)
    return _expand(block_ids, block_size_factor, skip_count, outputs)


def expand_block_ids_out(
    block_ids: Tensor,
    block_size_factor: int,
    skip_count: int = 0,
    count: int | None = None,
    *,
    out: Tensor,
) -> None:
    """The kernel of the op `expand_block_ids.out`."""
    operands = block_ids, block_size_factor, skip_count, count
    outputs = _check(_ops._check_expand_block_ids, *operands, out)
    out.detach().copy_(_expand(block_ids, block_size_factor, skip_count, outputs))


def _check(op: Callable[..., Any], *operands: Any) -> Any:
    """Calls a native check, and puts the vendor's name of the device into its error."""
    try:
        return op(*operands)
    except RuntimeError as error:
        name = torch.device("privateuseone").type
        raise RuntimeError(str(error).replace("privateuseone", name)) from None


def _expand(block_ids: Tensor, factor: int, skip: int, outputs: int) -> Tensor:
    small = torch.arange(skip, skip + outputs, device=block_ids.device)
    large = small // factor
    return block_ids.index_select(0, large) * factor + (small - large * factor)


def _copy_blocks(
    src: Sequence[Tensor], dst: Sequence[Tensor], src_block_ids: Tensor, dst_block_ids: Tensor
) -> None:
    """Copies blocks that have been checked, in pieces, through staging memory on both devices.

    A copy to or from the host waits for the stream, because earlier work on it may write the source
    or read the destination. The copy has ended when its call returns. So host tensors were read or
    written when this function returns, and staging memory on the host can be used again at once. On
    a device, the order of the stream makes that safe.
    """
    pairs = [pair for pair in zip(src, dst, strict=True) if pair[0].numel()]
    if not pairs or len(src_block_ids) == 0:
        return
    word_bytes = math.gcd(8, *(alignment(tensor, 0) for pair in pairs for tensor in pair))
    word = WORDS[word_bytes]
    sources = [as_words(tensor, 0, word) for tensor, _ in pairs]
    targets = [as_words(tensor, 0, word) for _, tensor in pairs]
    is_one_device = sources[0].device == targets[0].device
    ids = torch.stack((src_block_ids, dst_block_ids))
    src_ids = send_ids(ids, sources[0].device)
    if is_one_device:
        dst_ids = src_ids
    elif sources[0].is_cpu:
        dst_ids = ids.to(targets[0].device)  # a copy from the host, before the source is read
    else:
        dst_ids = send_ids(ids, targets[0].device)

    widths = [source.shape[1] for source in sources]
    pieces = list(_pieces(widths, ids.shape[1], STAGING_BYTES // word_bytes))
    most_words = max(sum(words for *_, words in piece) for piece in pieces)
    gathered = _staging(sources[0], most_words)
    received = gathered if is_one_device else _staging(targets[0], most_words)
    for piece in pieces:
        at = 0
        for t, begin, end, words in piece:
            rows = gathered[at : at + words].view(end - begin, widths[t])
            torch.index_select(sources[t], 0, src_ids[0, begin:end], out=rows)
            at += words
        if not is_one_device:
            received[:at].copy_(gathered[:at])
        at = 0
        for t, begin, end, words in piece:
            rows = received[at : at + words].view(end - begin, widths[t])
            targets[t].index_copy_(0, dst_ids[1, begin:end], rows)
            at += words


def _staging(rows: Tensor, words: int) -> Tensor:
    """Memory on the device of the rows, pinned if the rows are, so that copies are fast."""
    pinned = rows.is_cpu and rows.is_pinned()
    return torch.empty(words, dtype=rows.dtype, device=rows.device, pin_memory=pinned)


def _pieces(
    widths: Sequence[int], blocks: int, most_words: int
) -> Iterator[list[tuple[int, int, int, int]]]:
    """Divides the blocks of all tensors into pieces that fit into the staging memory.

    Yields:
        The blocks of a piece: tensor, first block, the block after the last, words.
    """
    piece: list[tuple[int, int, int, int]] = []
    room = most_words
    for t, width in enumerate(widths):
        begin = 0
        while begin < blocks:
            if piece and room < width:
                yield piece
                piece, room = [], most_words
            end = min(blocks, begin + max(room // width, 1))
            words = (end - begin) * width
            piece.append((t, begin, end, words))
            begin, room = end, room - words
    yield piece
