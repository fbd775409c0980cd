"""The ops of torch_kvswap: schemas, what they mean to a compiler, and typed wrappers.

=====================  =================================  ============================
op                     takes                              in a compiled graph
=====================  =================================  ============================
``swap_blocks``        tensors and a mapping of blocks    yes
``swap_kv_blocks``     the tensors of all layers and ids  yes
``expand_block_ids``   ids                                yes
``swap_blocks_batch``  addresses                          never: it breaks the graph
=====================  =================================  ============================

The ops on tensors declare what they write, and with a host tensor among their operands they return
only after the host bytes were read or written: compilers hand such ops clones of host tensors,
which are freed or copied back as soon as the op returns.

``swap_blocks_batch`` writes memory that its schema cannot name. A compiler that held it in a graph
would delete it or move reads across it, so it is registered without a fake implementation: tracing
stops in front of it and goes on behind it, and ``fullgraph=True`` and ``torch.export`` say so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from torch_kvswap._native import loader

# First, so that a library that cannot be loaded leaves nothing behind for the next try.
loader.load()

_torch: Any = torch  # these parts of it have no types
_library = _torch.library.Library("torch_kvswap", "DEF")

# Exact strides, because the distance between blocks is part of what these ops mean. Not inside CUDA
# graphs, because ids and host operands are read at the call, not at the replay.
_TAGS = (
    torch.Tag.pt2_compliant_tag,
    torch.Tag.needs_exact_strides,
    torch.Tag.cudagraph_unsafe,
)

_library.define(
    "swap_blocks(Tensor src, Tensor(a!) dst, int block_size_in_bytes, Tensor block_mapping) -> ()",
    tags=_TAGS,
)
_library.define(
    "swap_kv_blocks(Tensor[] src, Tensor(a!)[] dst, Tensor src_block_ids, Tensor dst_block_ids)"
    " -> ()",
    tags=_TAGS,
)
_library.define(
    "swap_blocks_batch(Tensor src_ptrs, Tensor dst_ptrs, Tensor sizes,"
    " bool is_src_access_order_any=False) -> ()",
    tags=(torch.Tag.cudagraph_unsafe,),
)
_library.define(
    "expand_block_ids(Tensor block_ids, SymInt block_size_factor, SymInt skip_count=0,"
    " SymInt? count=None) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.define(
    "expand_block_ids.out(Tensor block_ids, SymInt block_size_factor, SymInt skip_count=0,"
    " SymInt? count=None, *, Tensor(a!) out) -> ()",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _fake_write(*operands: Any, out: Any = None) -> None:
    tensors = [t for t in pytree.tree_leaves((operands, out)) if isinstance(t, Tensor)]
    if len({tensor.is_meta for tensor in tensors}) > 1:  # else a real tensor would stay unwritten
        raise RuntimeError("some operands are meta tensors and some are not; expected all or none")


def _fake_expand(
    block_ids: Tensor, block_size_factor: int, skip_count: int = 0, count: int | None = None
) -> Tensor:
    outputs: Any = block_ids.size(0) * block_size_factor - skip_count
    return block_ids.new_empty(outputs if count is None else _torch.sym_min(outputs, count))


def _check_torch() -> None:
    """Raises ImportError when this torch lacks what _register_write() needs.

    torch.library registers a kernel that counts versions up, but has no public name for what lies
    below that kernel, where the call has to go on. PyTorch's own mutable ops in Python
    (torch/_library/custom_ops.py) name it as we do, so the names change together with the way it
    is done, and not alone. A torch that lacks one is refused at import, not at the first call.
    """
    needed = {
        "torch._C._AutoDispatchBelowADInplaceOrView": hasattr(
            torch._C, "_AutoDispatchBelowADInplaceOrView"
        ),
        "torch._C._after_ADInplaceOrView_keyset": hasattr(
            torch._C, "_after_ADInplaceOrView_keyset"
        ),
        "torch._ops.OpOverload.redispatch": hasattr(_torch._ops.OpOverload, "redispatch"),
    }
    missing = [name for name, is_there in needed.items() if not is_there]
    if missing:
        raise ImportError(
            f"torch {torch.__version__} lacks {', '.join(missing)}, by which torch_kvswap tells "
            "autograd what its ops write; install another version of torch or of torch_kvswap"
        )


def _check_no_leaf(tensor: Tensor) -> None:
    """In PyTorch's words for its own in-place ops (check_inplace)."""
    if not tensor.requires_grad:
        return
    if tensor.is_leaf:
        raise RuntimeError(
            "a leaf Variable that requires grad is being used in an in-place operation."
        )
    if tensor._is_view() and tensor._base is not None and tensor._base.is_leaf:
        raise RuntimeError(
            "a view of a leaf Variable that requires grad is being used in an in-place operation."
        )


def _register_write(name: str, written: int | str) -> None:
    """An op that writes its operand `written`: autograd is told, as of every in-place op."""
    packet, _, overload = name.partition(".")
    op = getattr(getattr(_torch.ops.torch_kvswap, packet), overload or "default")

    def count_version(keys: Any, *operands: Any, **named: Any) -> None:
        changed = operands[written] if isinstance(written, int) else named[written]
        if torch.is_grad_enabled():
            for tensor in [changed] if isinstance(changed, Tensor) else changed:
                _check_no_leaf(tensor)
        torch.autograd.graph.increment_version(changed)
        with torch._C._AutoDispatchBelowADInplaceOrView():
            op.redispatch(keys & torch._C._after_ADInplaceOrView_keyset, *operands, **named)

    _library.impl(name, count_version, "ADInplaceOrView", with_keyset=True)
    _torch.library.register_fake(f"torch_kvswap::{name}", _fake_write, lib=_library)


_check_torch()
_register_write("swap_blocks", written=1)
_register_write("swap_kv_blocks", written=1)
_register_write("expand_block_ids.out", written="out")
_torch.library.register_fake("torch_kvswap::expand_block_ids", _fake_expand, lib=_library)


def _refuse_none(**operands: object) -> NoReturn:
    """PyTorch hands None to an op as a tensor without memory, and names no argument."""
    name = next(name for name, operand in operands.items() if operand is None)
    raise TypeError(f"{name} is None; it must be a tensor")


def swap_blocks(src: Tensor, dst: Tensor, block_size_in_bytes: int, block_mapping: Tensor) -> None:
    """Copies blocks of one tensor into blocks of another, byte by byte.

    ``src`` and ``dst`` hold blocks along dimension 0, on the CPU or a CUDA device each. The blocks
    of a tensor may lie apart (padding, or K and V in turn), but each is dense and has
    ``block_size_in_bytes`` bytes on both sides. ``block_mapping`` is an int64 CPU tensor of shape
    ``[n, 2]``: block ``block_mapping[i, 0]`` of ``src`` becomes block ``block_mapping[i, 1]`` of
    ``dst``. The copies run in any order: no block may be written twice, or read and written.

    Runs on the current stream of the device of ``dst``, or of ``src`` where ``dst`` is on the CPU;
    between two GPUs both current streams are ordered around the copy as in ``Tensor.copy_``. With a
    CPU tensor on either side the call returns when the bytes have been read or written; for
    asynchronous copies use :class:`OffloadHandler` or :func:`swap_blocks_batch`. Any thread may
    call.

    Raises RuntimeError, before anything is copied, for ids out of range, blocks that overlap, sizes
    that differ and tensors that are not as described; and for errors of the driver. Nothing is
    differentiable: autograd sees an in-place write, and refuses one into a leaf that requires grad.
    """
    if src is None or dst is None or block_mapping is None:
        _refuse_none(src=src, dst=dst, block_mapping=block_mapping)
    torch.ops.torch_kvswap.swap_blocks(src, dst, block_size_in_bytes, block_mapping)


def swap_kv_blocks(
    src: Sequence[Tensor], dst: Sequence[Tensor], src_block_ids: Tensor, dst_block_ids: Tensor
) -> None:
    """Copies the same blocks between all layers of two caches in one call.

    ``src[l]`` and ``dst[l]`` are as in :func:`swap_blocks`; layers may differ in shape, strides and
    dtype, but all of ``src`` are on one device, and all of ``dst``. ``src_block_ids`` and
    ``dst_block_ids`` are int64 CPU tensors of shape ``[n]``: in every layer block
    ``src_block_ids[i]`` becomes block ``dst_block_ids[i]``. Streams, threads and errors are as in
    :func:`swap_blocks`.
    """
    if src_block_ids is None or dst_block_ids is None:
        _refuse_none(src_block_ids=src_block_ids, dst_block_ids=dst_block_ids)
    torch.ops.torch_kvswap.swap_kv_blocks(src, dst, src_block_ids, dst_block_ids)


def swap_blocks_batch(
    src_ptrs: Tensor, dst_ptrs: Tensor, sizes: Tensor, is_src_access_order_any: bool = False
) -> None:
    """Copies ``sizes[i]`` bytes from address ``src_ptrs[i]`` to address ``dst_ptrs[i]``, for all i.

    The three are contiguous int64 CPU tensors of shape ``[n]``; the caller may change or free them
    when the call returns. All device addresses lie on one device. The copies run on that device's
    current stream, whichever device is current, and the call does not wait for them: what they read
    and write stays alive and unchanged until the stream has passed them. Pageable host memory is
    the exception: with any of it the call waits for the stream. A batch without any device address
    is copied before the call returns and ordered with no stream. Copies of one call run in any
    order and must not overlap. Any thread may call.

    ``is_src_access_order_any`` lets the copy engine read host sources before earlier work in the
    stream has ended, for sources that are complete already. Device sources are always read in
    stream order.

    While the stream is captured into a CUDA graph the copies are recorded, with these addresses;
    pageable memory is refused there.

    Environment: ``KVSWAP_BATCH_LIMIT`` fragments per driver call (8192); ``KVSWAP_BATCH=0`` copies
    one by one; ``KVSWAP_CHECK_ADDRESSES=1`` checks every range against the allocations, and for
    overlaps, before anything is copied.

    Raises RuntimeError with the index for negative sizes, null addresses and addresses on a second
    device, before anything is copied; and for errors of the driver, after which what came before
    the index may have been copied.
    """
    if src_ptrs is None or dst_ptrs is None or sizes is None:
        _refuse_none(src_ptrs=src_ptrs, dst_ptrs=dst_ptrs, sizes=sizes)
    torch.ops.torch_kvswap.swap_blocks_batch(src_ptrs, dst_ptrs, sizes, is_src_access_order_any)


def expand_block_ids(
    block_ids: Tensor,
    block_size_factor: int,
    skip_count: int = 0,
    count: int | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Numbers the small blocks inside large ones: id ``b`` becomes ``b * f + 0 ... b * f + f - 1``.

    ``block_ids`` is an int64 tensor of shape ``[n]`` on the CPU or a CUDA device. Of the
    ``n * block_size_factor`` ids the first ``skip_count`` are left out and at most ``count`` come
    back, so that both ends of a chunk can be partial. The result, or ``out``, is an int64 tensor on
    the same device. On CUDA it is written on the current stream, and negative ids, refused on the
    CPU, are not looked for.

    Raises RuntimeError for a factor below 1 and for counts out of range.
    """
    if block_ids is None:
        _refuse_none(block_ids=block_ids)
    if out is None:
        result: Tensor = torch.ops.torch_kvswap.expand_block_ids(
            block_ids, block_size_factor, skip_count, count
        )
        return result
    torch.ops.torch_kvswap.expand_block_ids.out(
        block_ids, block_size_factor, skip_count, count, out=out
    )
    return out
