"""The ops of torch_kvswap: schemas, fake implementations for compilers, and typed wrappers.

=====================  =================================  ============================
op                     takes                              in a compiled graph
=====================  =================================  ============================
``swap_blocks``        tensors and a block mapping        yes
``swap_kv_blocks``     the tensors of all layers and ids  yes
``expand_block_ids``   ids                                yes
``swap_blocks_batch``  addresses                          never: it breaks the graph
=====================  =================================  ============================

The ops on tensors declare what they write, and their wrappers tell autograd. If one of their
operands is a host tensor, they return only after the host bytes were read or written: compilers
pass clones of host tensors, which are freed or copied back as soon as the op returns.

``swap_blocks_batch`` writes memory that its schema cannot name. A compiler that kept it in a graph
could delete it or move reads across it. It is therefore registered without a fake implementation:
tracing breaks the graph at the call, and ``fullgraph=True`` and ``torch.export`` raise.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, SupportsIndex

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from torch_kvswap._native.arguments import kind_of, read_switch
from torch_kvswap._native.loader import native
from torch_kvswap.devices import generic_ops
from torch_kvswap.devices.kind import is_native

_torch: Any = torch  # torch.library and torch._ops lack type annotations
_library = _torch.library.Library("torch_kvswap", "DEF")

# Exact strides, because the distance between blocks is part of the meaning of these ops. Unsafe in
# CUDA graphs, because ids and host operands are read at the call and not at the replay.
_TAGS = (
    torch.Tag.pt2_compliant_tag,
    torch.Tag.needs_exact_strides,
    torch.Tag.cudagraph_unsafe,
)

_library.define(
    "swap_blocks(Tensor src, Tensor(a!) dst, SymInt block_size_in_bytes, Tensor block_mapping)"
    " -> ()",
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


def _fake_write(op: str, *operands: Any, out: Any = None) -> None:
    """The fake of an op that writes an operand and returns nothing."""
    tensors = [t for t in pytree.tree_leaves((operands, out)) if isinstance(t, Tensor)]
    if len({tensor.is_meta for tensor in tensors}) > 1:  # a real destination would stay unwritten
        raise RuntimeError(
            f"{op}: some operands are meta tensors and some are not; expected all or none"
        )


def _fake_expand(
    block_ids: Tensor, block_size_factor: int, skip_count: int = 0, count: int | None = None
) -> Tensor:
    outputs: Any = block_ids.size(0) * block_size_factor - skip_count
    return block_ids.new_empty(outputs if count is None else _torch.sym_min(outputs, count))


for _name in ("swap_blocks", "swap_kv_blocks", "expand_block_ids.out"):
    _qualified = f"torch_kvswap::{_name}"
    _torch.library.register_fake(_qualified, partial(_fake_write, _qualified), lib=_library)
_torch.library.register_fake("torch_kvswap::expand_block_ids", _fake_expand, lib=_library)
if is_native("cuda"):
    native.register_cuda_ops()
for _key in generic_ops.DISPATCH_KEYS:
    _library.impl("swap_blocks", generic_ops.swap_blocks, _key)
    _library.impl("swap_kv_blocks", generic_ops.swap_kv_blocks, _key)
    _library.impl("expand_block_ids", generic_ops.expand_block_ids, _key)
    _library.impl("expand_block_ids.out", generic_ops.expand_block_ids_out, _key)


def _check(tensors: dict[str, object], integers: dict[str, object] | None = None) -> None:
    """Raises TypeError that names the operand of a wrong type: PyTorch itself treats None as an
    empty tensor, and prints the values of others and its schemas."""
    for name, operand in tensors.items():
        if not isinstance(operand, Tensor):
            raise TypeError(f"{name} is {kind_of(operand)}; it must be a tensor")
    for name, operand in (integers or {}).items():
        if not isinstance(operand, SupportsIndex):  # numpy's integers and torch.SymInt are
            raise TypeError(f"{name} is {kind_of(operand)}; it must be an integer")


def _announce_write(op: str, name: str, written: Tensor | Sequence[Tensor]) -> None:
    """Tells autograd of a write, so that a backward pass that needs the old values raises.

    Not done by the kernels, because they never see the tensors of a compiler, a dispatch mode or a
    tensor subclass.

    Raises:
        RuntimeError: a tensor requires grad, and grad mode is enabled.
    """
    if torch.is_grad_enabled():
        for i, tensor in enumerate([written] if isinstance(written, Tensor) else written):
            if tensor.requires_grad:
                at = name if isinstance(written, Tensor) else f"{name}[{i}]"
                raise RuntimeError(
                    f"torch_kvswap::{op}: {at} requires grad, but the op has no gradient; call it "
                    f"under torch.no_grad(), or pass {at}.detach()"
                )
    torch.autograd.graph.increment_version(written)


def _refuse_other_devices() -> None:
    """Raises RuntimeError if addresses may lie on a device that only torch knows.

    Nothing but the vendor's library can tell an address there from one in host memory.
    """
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is not None and not is_native(accelerator.type):
        raise RuntimeError(
            "torch_kvswap::swap_blocks_batch: the accelerator of this process is "
            f"{accelerator.type}, whose addresses only torch knows; use swap_blocks or "
            "swap_kv_blocks, which take tensors of any device"
        )


def swap_blocks(src: Tensor, dst: Tensor, block_size_in_bytes: int, block_mapping: Tensor) -> None:
    """Copies blocks of one tensor into blocks of another, byte by byte.

    The copies of one call run in any order: no block may be written twice, or read and written.
    Runs on the current stream of the device of ``dst``, or of ``src`` if ``dst`` is on the CPU.
    Between two devices both current streams are ordered around the copy, as in ``Tensor.copy_``.
    With a CPU tensor on either side, the call returns after the bytes were read or written; for
    asynchronous copies use :class:`OffloadHandler` or :func:`swap_blocks_batch`. Any thread may
    call.

    On devices other than the CPU and CUDA, PyTorch's own operations gather the blocks, copy them
    and scatter them, 32 MiB at a time.

    Not differentiable: ``src`` gets no gradient, a ``dst`` that requires grad is refused unless
    grad mode is disabled, and a backward pass that needs overwritten values raises.
    ``torch.ops.torch_kvswap.swap_blocks`` has neither check.

    Args:
        src (Tensor): blocks along dimension 0, on any device whose tensors have an address. Blocks
            may lie apart (padding, or K and V interleaved), but each is dense.
        dst (Tensor): as src.
        block_size_in_bytes (int): bytes per block, equal on both sides.
        block_mapping (Tensor): int64 ``[n, 2]`` on the CPU; block ``block_mapping[i, 0]`` of
            ``src`` is copied to block ``block_mapping[i, 1]`` of ``dst``.

    Raises:
        TypeError: an operand has a wrong type.
        RuntimeError: an id is out of range, blocks overlap, sizes differ, or a tensor is not as
            described (before anything is copied); or the driver reports an error.
    """
    if not (
        isinstance(src, Tensor)
        and isinstance(dst, Tensor)
        and isinstance(block_size_in_bytes, int)
        and isinstance(block_mapping, Tensor)
    ):
        tensors = {"src": src, "dst": dst, "block_mapping": block_mapping}
        _check(tensors, {"block_size_in_bytes": block_size_in_bytes})
    _announce_write("swap_blocks", "dst", dst)
    torch.ops.torch_kvswap.swap_blocks(src, dst, block_size_in_bytes, block_mapping)


def swap_kv_blocks(
    src: Sequence[Tensor], dst: Sequence[Tensor], src_block_ids: Tensor, dst_block_ids: Tensor
) -> None:
    """Copies the same blocks between all layers of two caches in one call.

    Streams, threads, errors and autograd are as in :func:`swap_blocks`.

    Args:
        src (Sequence[Tensor]): one tensor per layer, all on one device, each as in
            :func:`swap_blocks`. Layers may differ in shape, strides and dtype.
        dst (Sequence[Tensor]): as src, with as many layers.
        src_block_ids (Tensor): int64 ``[n]`` on the CPU; in every layer, block ``src_block_ids[i]``
            of ``src`` is copied to block ``dst_block_ids[i]`` of ``dst``.
        dst_block_ids (Tensor): int64 ``[n]`` on the CPU.
    """
    if not (isinstance(src_block_ids, Tensor) and isinstance(dst_block_ids, Tensor)):
        _check({"src_block_ids": src_block_ids, "dst_block_ids": dst_block_ids})
    for name, layers in (("src", src), ("dst", dst)):
        if not isinstance(layers, list | tuple):
            raise TypeError(
                f"{name} is {kind_of(layers)}; pass a list with a tensor for each layer"
            )
        if not all(isinstance(layer, Tensor) for layer in layers):
            _check({f"{name}[{i}]": layer for i, layer in enumerate(layers)})
    _announce_write("swap_kv_blocks", "dst", dst)
    torch.ops.torch_kvswap.swap_kv_blocks(src, dst, src_block_ids, dst_block_ids)


def swap_blocks_batch(
    src_ptrs: Tensor, dst_ptrs: Tensor, sizes: Tensor, is_src_access_order_any: bool = False
) -> None:
    """Copies ``sizes[i]`` bytes from address ``src_ptrs[i]`` to address ``dst_ptrs[i]``, for all i.

    The copies run on the current stream of the device that the addresses are on, whichever device
    is current. The call does not wait for them: source and destination must stay alive, and the
    source unchanged, until the stream has passed the copies. If any host memory is pageable, the
    call waits for the stream. A batch without device addresses is copied before the call returns
    and is not ordered with any stream. The copies of one call run in any order and must not
    overlap. Any thread may call.

    While the stream is captured into a CUDA graph, the copies are recorded with these addresses;
    pageable memory is refused then.

    If PyTorch's accelerator is another device than CUDA, the call is refused: only the vendor's
    library knows which addresses are that device's. ``torch.ops.torch_kvswap.swap_blocks_batch``
    does not check this.

    ``KVSWAP_CHECK_ADDRESSES=1`` checks every range against the allocations, and for overlaps,
    before anything is copied.

    Args:
        src_ptrs (Tensor): contiguous int64 ``[n]`` on the CPU; may be changed or freed after the
            call. All device addresses of a call are on one device.
        dst_ptrs (Tensor): as src_ptrs.
        sizes (Tensor): as src_ptrs; bytes. With a size of 0 the addresses are not looked at.
        is_src_access_order_any (bool): let the copy engine read host sources before earlier work in
            the stream has ended. For sources that are already complete. Device sources are always
            read in stream order.

    Raises:
        TypeError: an operand has a wrong type.
        RuntimeError: the accelerator is not CUDA; a negative size, a null address or an address
            on a second device, with its index (before anything is copied); or the driver reports
            an error, with an index: copies before it may have run.
    """
    if not (
        isinstance(src_ptrs, Tensor) and isinstance(dst_ptrs, Tensor) and isinstance(sizes, Tensor)
    ):
        _check({"src_ptrs": src_ptrs, "dst_ptrs": dst_ptrs, "sizes": sizes})
    if not isinstance(is_src_access_order_any, bool):
        read_switch("is_src_access_order_any", is_src_access_order_any)
    _refuse_other_devices()
    torch.ops.torch_kvswap.swap_blocks_batch(src_ptrs, dst_ptrs, sizes, is_src_access_order_any)


def expand_block_ids(
    block_ids: Tensor,
    block_size_factor: int,
    skip_count: int = 0,
    count: int | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Expands ids of large blocks into ids of the small blocks inside them.

    With ``f = block_size_factor``, id ``b`` becomes ``b * f, ..., b * f + f - 1``. On a device the
    result is written on the current stream, and negative ids are not detected.

    Args:
        block_ids (Tensor): int64 ``[n]`` on any device whose tensors have an address.
        block_size_factor (int): small blocks per large block, 1 or more.
        skip_count (int): number of leading ids to leave out, for a chunk that starts inside a large
            block.
        count (int | None): the largest number of ids to return; None returns all.
        out (Tensor | None): int64 tensor on the same device to write into.

    Returns:
        Tensor: int64 ids on the device of ``block_ids``; ``out`` if it was given.

    Raises:
        TypeError: block_ids is no tensor, or a number is no integer.
        RuntimeError: the factor is below 1, a count is out of range, or an id on the CPU is
            negative.
    """
    if not (
        isinstance(block_ids, Tensor)
        and isinstance(block_size_factor, int)
        and isinstance(skip_count, int)
        and isinstance(count, int | None)
        and (out is None or isinstance(out, Tensor))
    ):
        tensors = {"block_ids": block_ids} | ({} if out is None else {"out": out})
        integers = {"block_size_factor": block_size_factor, "skip_count": skip_count}
        _check(tensors, integers | ({} if count is None else {"count": count}))
    if out is None:
        result: Tensor = torch.ops.torch_kvswap.expand_block_ids(
            block_ids, block_size_factor, skip_count, count
        )
        return result
    _announce_write("expand_block_ids", "out", out)
    torch.ops.torch_kvswap.expand_block_ids.out(
        block_ids, block_size_factor, skip_count, count, out=out
    )
    return out
