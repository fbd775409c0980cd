"""The memory layout of a paged cache: slabs of blocks, and layouts that alias each other."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torch_kvswap._native.arguments import (
    INT64_MAX,
    INT64_MIN,
    Int64Array,
    kind_of,
    read_int,
)

_ALIGNMENT = 512  # bytes by which PyTorch's CUDA allocator aligns
_BLOCKS = "blocks"  # their number in the description of a tensor
_DESCRIBED = re.compile(
    rf"(?s:(?P<name>.*): )?(?P<dtype>\w+) \[(?P<shape>(?:\d+, )*{_BLOCKS}(?:, \d+)*)\]"
    r"(?: in the order \[(?P<order>\d+(?:, \d+)*)\])?(?:, bytes of (?P<values>\w+))?"
)


class Slabs:
    """Slabs of equally many blocks: block b has sizes[s] bytes at bases[s] + b * strides[s].

    A slab is one layer's K or V (or another tensor part) of all blocks. Holds addresses only and
    keeps no memory alive.

    Attributes:
        bases (np.ndarray): int64 [slabs], address of block 0.
        strides (np.ndarray): int64 [slabs], bytes from one block to the next.
        sizes (np.ndarray): int64 [slabs], bytes of a block in the slab.
        num_blocks (int): blocks per slab.
        block_bytes (int): bytes of a block in all slabs together.
    """

    def __init__(
        self, bases: Int64Array, strides: Int64Array, sizes: Int64Array, num_blocks: int
    ) -> None:
        self.bases = bases
        self.strides = strides
        self.sizes = sizes
        self.num_blocks = num_blocks
        self.block_bytes = int(sizes.sum())


class PagedLayout(Slabs):
    """The layout of a paged cache that is stored in tensors.

    Each index of the dimensions before `block_dim` is a slab: K and V split as [2, num_blocks, ...]
    with block_dim=1 are two slabs per tensor. The part of a block in a slab is a fragment. It has
    no gaps between its values, in whatever order its dimensions are; fragments may lie apart
    (padded strides). No two slabs may share a byte.

    The layout holds the tensors. Nothing may free or move their memory while the layout is in use.
    Immutable, so any thread may read it. A copied or unpickled layout is rebuilt from the copied
    tensors.

    Args:
        tensors (Sequence[Tensor] | Mapping[str, Tensor]): tensors of any dtype on one device,
            usually one per layer, with the same number of blocks in dimension `block_dim`. Names,
            such as {"layers.0.k": k, "layers.0.v": v}, keep engines that share pages from mixing up
            tensors of equal shape.
        block_dim (int | None): the dimension that counts blocks; not negative. 0 for tensors of the
            shape [num_blocks, ...], 1 for [2, num_blocks, ...], with keys and values apart. None
            means 0, and refuses tensors of shape [2, n, ...], which could be either.
        dtype (torch.dtype | None): the type of the keys and values, if the tensors are views of
            their bytes (torch.uint8 or torch.int8). None is the type of the tensors.

    Attributes:
        tensors (tuple[Tensor, ...]): the tensors.
        names (tuple[str, ...] | None): the name of each; None without names.
        block_dim (int): the dimension that counts blocks.
        dtype (torch.dtype | None): the type of the keys and values; None if the tensors have
            several. Copies do not depend on it, but an encoding of host pages does.
        device (torch.device): the device of all tensors.
        num_blocks (int): blocks of the cache.
        block_bytes (int): bytes of a block.
        sizes (np.ndarray): int64, bytes of each fragment of a block: tensor by tensor, and in a
            tensor by the dimensions before `block_dim`.

    Raises:
        TypeError: tensors is not a list or a mapping of strided tensors, a name is not a string,
            block_dim is not an integer, or dtype is not a torch.dtype.
        ValueError: a tensor (named in the message) cannot be described as blocks, or tensors differ
            in device or number of blocks, or two of them share memory, or dtype is not the type of
            a tensor, or a tensor has no memory (meta, fake).
    """

    def __init__(
        self,
        tensors: Sequence[Tensor] | Mapping[str, Tensor],
        block_dim: int | None = None,
        *,
        dtype: torch.dtype | None = None,
    ) -> None:
        if isinstance(tensors, Tensor) or not isinstance(tensors, Iterable):
            raise TypeError(
                f"tensors is {kind_of(tensors)}; pass a list, [tensor] for a single tensor"
            )
        self.names: tuple[str, ...] | None = None
        if isinstance(tensors, Mapping):
            self.names, tensors = tuple(tensors), list(tensors.values())
            for name in self.names:
                if not isinstance(name, str):
                    raise TypeError(f"tensors has the key {name!r}; its keys must be names")
        self.tensors = tuple(tensors)
        if not self.tensors:
            raise ValueError("tensors is empty; a layout needs at least one tensor")
        is_chosen = block_dim is not None
        block_dim = read_int("block_dim", block_dim, INT64_MIN) if block_dim is not None else 0
        places = self.names or range(len(self.tensors))
        for place, tensor in zip(places, self.tensors, strict=True):
            if not isinstance(tensor, Tensor):
                advice = "it must be a tensor"
                if isinstance(tensor, tuple | list):
                    advice += "; pass the tensors of all layers in one list"
                raise TypeError(f"tensors[{place!r}] is {kind_of(tensor)}; {advice}")
            if tensor.layout != torch.strided:
                raise TypeError(f"tensors[{place!r}] is {tensor.layout}; blocks need torch.strided")
            if not is_chosen and tensor.dim() > 2 and tensor.shape[0] == 2 < tensor.shape[1]:
                raise ValueError(
                    f"tensors[{place!r}] has shape {list(tensor.shape)}, which can be keys "
                    f"and values of {tensor.shape[1]} blocks, or 2 blocks; pass block_dim=1 or "
                    "block_dim=0"
                )
            problem = _problem(tensor, self.tensors[0], block_dim)
            if problem:
                raise ValueError(
                    f"tensors[{place!r}] (shape {list(tensor.shape)}, strides "
                    f"{list(tensor.stride())}, {tensor.dtype}, {tensor.device}) {problem}"
                )
        self.block_dim = block_dim
        self.dtype = _dtype_of(self.tensors, block_dim, dtype)
        self.device: torch.device = self.tensors[0].device
        bases = [_slab_bases(tensor, block_dim) for tensor in self.tensors]
        strides = [tensor.stride(block_dim) * tensor.element_size() for tensor in self.tensors]
        sizes = [_block_numel(tensor, block_dim) * tensor.element_size() for tensor in self.tensors]
        slabs = [len(of_tensor) for of_tensor in bases]
        super().__init__(
            bases=np.concatenate(bases),
            strides=np.repeat(np.array(strides, np.int64), slabs),
            sizes=np.repeat(np.array(sizes, np.int64), slabs),
            num_blocks=self.tensors[0].shape[block_dim],
        )
        self._tensor_of_slab = np.repeat(np.arange(len(slabs), dtype=np.int64), slabs)
        storages = [tensor.untyped_storage().data_ptr() for tensor in self.tensors]
        self._storages = np.repeat(np.array(storages, np.int64), slabs)  # per slab
        self._addresses = [tensor.data_ptr() for tensor in self.tensors]
        self._storage_ends = [_storage_end(tensor) for tensor in self.tensors]
        if overlap := _overlapping_slabs(self):
            first, second = (places[self._tensor_of_slab[slab]] for slab in overlap)
            raise ValueError(
                f"tensors[{first!r}] and tensors[{second!r}] share memory, so a load would write "
                "some bytes twice; pass each tensor once, and none that overlap"
            )

    def __repr__(self) -> str:
        return (
            f"PagedLayout(tensors={len(self.tensors)}, num_blocks={self.num_blocks}, "
            f"block_bytes={self.block_bytes}, device={self.device})"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        # Built again, because copied tensors have other addresses.
        tensors: Any = self.tensors
        if self.names is not None:
            tensors = dict(zip(self.names, self.tensors, strict=True))
        return partial(PagedLayout, dtype=self.dtype), (tensors, self.block_dim)

    def _describe(self) -> list[str]:
        """What a block has in each tensor: name, type, shape, and the order of the bytes, in words.

        Two layouts whose blocks have the same bytes in host memory have equal descriptions only if
        these bytes have the same types and axes, and tensors of the same names, or none. The number
        of blocks, and where they lie in the memory of the device, make no difference.
        """
        dtypes = (self.dtype or tensor.dtype for tensor in self.tensors)
        described = [
            _describe_tensor(tensor, self.block_dim, dtype)
            for tensor, dtype in zip(self.tensors, dtypes, strict=True)
        ]
        if self.names is None:
            return described
        return [f"{name}: {text}" for name, text in zip(self.names, described, strict=True)]

    def _check_unmoved(self, name: str = "tensors") -> None:
        """Raises RuntimeError if a tensor has moved since construction, or its storage was freed or
        shrunk. The error calls the list of tensors `name`.
        """
        for index, tensor in enumerate(self.tensors):
            problem = _storage_problem(tensor, self._storage_ends[index])
            if problem is None and tensor.data_ptr() != self._addresses[index]:
                problem = f"has moved from {self._addresses[index]:#x} to {tensor.data_ptr():#x}"
            if problem:
                raise RuntimeError(
                    f"{name}[{index}] {problem} since the layout was made; make a new layout and "
                    "pass it to rebind()"
                )


def layout_like(described: Sequence[str]) -> PagedLayout:
    """A layout in CPU memory, of one block, that _describe() describes so.

    Raises:
        ValueError: nothing is described so.
    """
    tensors, names, block_dim, dtype = [], [], 0, None
    for text in described:
        match = _DESCRIBED.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r} does not describe a tensor of a cache")
        sizes = match["shape"].split(", ")
        block_dim = sizes.index(_BLOCKS)
        shape = [1 if size == _BLOCKS else int(size) for size in sizes]
        order = list(range(len(shape)))
        if match["order"]:
            order = list(map(int, match["order"].split(", ")))
        if sorted(order) != list(range(len(shape))):
            raise ValueError(f"{text!r} does not order {len(shape)} dimensions")
        memory = torch.empty(
            [shape[dim] for dim in order], dtype=_dtype_named(match["dtype"]), device="cpu"
        )
        tensors.append(memory.permute(np.argsort(order).tolist()))
        names.append(match["name"])
        if match["values"]:
            dtype = _dtype_named(match["values"])
    if not any(name is not None for name in names):
        return PagedLayout(tensors, block_dim, dtype=dtype)
    named = dict(zip(names, tensors, strict=True))
    if None in named or len(named) < len(tensors):
        raise ValueError(f"{names} do not name {len(tensors)} tensors")
    return PagedLayout(named, block_dim, dtype=dtype)


def allocate_layers(
    shape: Sequence[int],
    num_layers: int,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | int | None = None,
) -> list[Tensor]:
    """Allocates the layers of a cache as equidistant slices of one allocation.

    The driver then copies a block of all layers with one strided copy. Layers that were allocated
    one by one take a copy for each layer, because a copy cannot span two allocations
    (docs/copy_methods.md has figures). Each layer begins at a multiple of 512 bytes, as tensors of
    PyTorch's CUDA allocator do.

    With keys and values apart, as in [2, num_blocks, ...], one copy is enough only if the bytes of
    a layer are a multiple of 512. Otherwise there is one copy for each layer.

    Args:
        shape (Sequence[int]): the shape of a layer, such as [num_blocks, block_size, heads, size].
        num_layers (int): the number of layers.
        dtype (torch.dtype | None): as in `torch.zeros`.
        device (torch.device | str | int | None): as in `torch.zeros`.

    Returns:
        list[Tensor]: contiguous tensors of zeros that share their storage. It is freed when the
            last of them is.

    Raises:
        TypeError: shape is not a sequence of integers, num_layers is not an integer, or dtype is no
            dtype.
        ValueError: a number is not positive, shape is empty, the layers are larger than any memory,
            or PyTorch cannot use the device.
    """
    num_layers = read_int("num_layers", num_layers, 1)
    if isinstance(shape, str) or not isinstance(shape, Iterable):
        raise TypeError(
            f"shape is {kind_of(shape)}; pass the shape of one layer, such as (2, 1000, 16)"
        )
    sizes = [read_int(f"shape[{dim}]", size, 1) for dim, size in enumerate(shape)]
    if not sizes:
        raise ValueError("shape is empty; a layer needs a dimension that counts blocks")
    dtype = torch.get_default_dtype() if dtype is None else dtype
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype is {kind_of(dtype)}; it must be a torch.dtype")
    nbytes = math.prod(sizes) * dtype.itemsize
    distance = (nbytes + _ALIGNMENT - 1) // _ALIGNMENT * _ALIGNMENT
    if (needed := (num_layers - 1) * distance + nbytes) > INT64_MAX:
        raise ValueError(
            f"num_layers={num_layers} with shape {sizes} need {needed} bytes, more than can be "
            "addressed; ask for fewer blocks"
        )
    if device is not None:
        _check_device(device)
    whole = torch.zeros(needed, dtype=torch.uint8, device=device)
    slices = (whole[i * distance :][:nbytes] for i in range(num_layers))
    return [layer.view(dtype).view(sizes) for layer in slices]


def _check_device(device: torch.device | str | int) -> None:
    """Raises ValueError unless PyTorch can have tensors there; its own error can fill a screen."""
    try:
        known = torch.device(device)
    except (RuntimeError, TypeError):
        raise ValueError(
            f"device is {device!r}; it must be a device of PyTorch, such as 'cuda' or 'cpu'"
        ) from None
    try:
        torch.empty(0, device=known)
    except (AssertionError, ImportError, RuntimeError) as error:
        why = str(error).splitlines()[0].partition(". ")[0]
        raise ValueError(
            f"device is {device!r}, but PyTorch cannot use it ({why}); pass another one, such as "
            "'cpu'"
        ) from error


def _dtype_of(
    tensors: Sequence[Tensor], block_dim: int, dtype: torch.dtype | None
) -> torch.dtype | None:
    """The type of the values in the tensors, None if there are several.

    Raises:
        TypeError: dtype is not a torch.dtype.
        ValueError: a tensor holds neither values of this type nor bytes of whole values.
    """
    if dtype is None:
        kinds = {tensor.dtype for tensor in tensors}
        return kinds.pop() if len(kinds) == 1 else None
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype is {kind_of(dtype)}; it must be a torch.dtype, or None")
    for index, tensor in enumerate(tensors):
        if tensor.dtype == dtype:
            continue
        if tensor.dtype not in (torch.uint8, torch.int8):
            raise ValueError(
                f"dtype is {dtype}, but tensors[{index}] is of {tensor.dtype}; leave dtype out, or "
                "pass views of the tensors' bytes"
            )
        nbytes = _block_numel(tensor, block_dim)
        if nbytes % dtype.itemsize:
            raise ValueError(
                f"dtype is {dtype}, but a block has {nbytes} bytes in tensors[{index}], which is "
                f"no multiple of {dtype.itemsize}"
            )
    return dtype


def _problem(tensor: Tensor, first: Tensor, block_dim: int) -> str | None:
    """Why the tensor cannot be part of the layout, and what to do; None if it can."""
    if tensor.dim() == 0:
        return "has no dimension that counts blocks; give it one"
    if not 0 <= block_dim < tensor.dim():
        return (
            f"has no dimension block_dim={block_dim}; name the dimension that counts blocks, "
            f"0 to {tensor.dim() - 1}"
        )
    if tensor.device != first.device:
        return (
            f"is on another device than tensors[0] ({first.device}); make a layout for each device"
        )
    num_blocks = tensor.shape[block_dim]
    if num_blocks != first.shape[block_dim]:
        return (
            f"has {num_blocks} blocks in dimension {block_dim}, tensors[0] has "
            f"{first.shape[block_dim]}; check block_dim, or make a layout for each size"
        )
    if tensor.numel() == 0:
        return "holds no bytes; leave it out"
    if not _has_memory(tensor):
        return "has no memory (on meta, or fake); pass tensors of a device or of the CPU"
    if not _is_dense(tensor, block_dim):
        return (
            f"is not dense within a block (the dimensions after block_dim={block_dim}); "
            "make it contiguous, or put the dimension with the gaps before block_dim"
        )
    if problem := _storage_problem(tensor, _storage_end(tensor)):
        return f"{problem}: bring its memory back first"
    return _overlap(tensor, block_dim)


def _has_memory(tensor: Tensor) -> bool:
    """Whether the tensor has an address, or had one before its storage was freed."""
    try:
        storage = tensor.untyped_storage()
        # The storage of a fake tensor is on meta, whichever device the tensor names.
        return storage.device.type != "meta" and (not storage.nbytes() or storage.data_ptr() != 0)
    except RuntimeError:  # a wrapper has no storage, or one without an address
        return False


def address_of(tensor: Tensor) -> int:
    """The address of a tensor that this library has made, for native code.

    Raises:
        RuntimeError: it has none, because FakeTensorMode has made a fake one.
    """
    if not _has_memory(tensor):
        raise RuntimeError("FakeTensorMode makes tensors without memory; call this outside of it")
    return tensor.data_ptr()


def _describe_tensor(tensor: Tensor, block_dim: int, dtype: torch.dtype) -> str:
    """See PagedLayout._describe(). `dtype` is the type of the values."""
    shape = list(tensor.shape)
    inner = range(block_dim + 1, len(shape))
    in_memory = sorted((dim for dim in inner if shape[dim] > 1), key=tensor.stride, reverse=True)
    is_in_bytes = tensor.dtype != dtype
    if is_in_bytes and in_memory and shape[in_memory[-1]] % dtype.itemsize == 0:
        # The tensor of the values, of which this is a view, is described so.
        shape[in_memory[-1]] //= dtype.itemsize
        is_in_bytes = False
    # A dimension with one index lies nowhere in particular: it keeps its place.
    moved = iter([dim for dim in in_memory if shape[dim] > 1])
    order = [next(moved) if dim in inner and shape[dim] > 1 else dim for dim in range(len(shape))]
    sizes = [_BLOCKS if dim == block_dim else str(size) for dim, size in enumerate(shape)]
    text = f"{_name_of(tensor.dtype if is_in_bytes else dtype)} [{', '.join(sizes)}]"
    if order != sorted(order):
        text += f" in the order {order}"
    return f"{text}, bytes of {_name_of(dtype)}" if is_in_bytes else text


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype_named(name: str) -> torch.dtype:
    """Raises ValueError if this PyTorch has no such type."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is not a type of PyTorch")
    return dtype


def _storage_end(tensor: Tensor) -> int:
    """Bytes of the tensor's storage up to its last element."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = tensor.storage_offset() + sum((size - 1) * stride for size, stride in steps)
    return int(last + 1) * tensor.element_size()


def _storage_problem(tensor: Tensor, end: int) -> str | None:
    """What is wrong if the storage has fewer bytes than `end`."""
    storage = tensor.untyped_storage().nbytes()
    if storage >= end:
        return None
    return f"reaches to byte {end} of its storage, which was freed or resized to {storage}"


def _overlapping_slabs(slabs: Slabs) -> tuple[int, int] | None:
    """The indices of two slabs that share a byte, or None."""
    order = np.argsort(slabs.bases, kind="stable")
    bases, strides, sizes = slabs.bases[order], slabs.strides[order], slabs.sizes[order]
    ends = bases + (slabs.num_blocks - 1) * strides + sizes
    begin_before = np.searchsorted(bases, ends)
    for slab in np.flatnonzero(begin_before > np.arange(1, len(bases) + 1)):
        others = slice(slab + 1, begin_before[slab])
        # Blocks of two slabs may interleave, like K and V. The distances between their blocks are
        # all equal modulo the greatest common divisor of the two strides.
        unit = np.gcd(strides[slab], strides[others])
        offset = (bases[others] - bases[slab]) % unit
        shared = (offset < sizes[slab]) | (offset + sizes[others] > unit)
        if shared.any():
            return int(order[slab]), int(order[slab + 1 + np.argmax(shared)])
    return None


def _block_numel(tensor: Tensor, block_dim: int) -> int:
    return math.prod(tensor.shape[block_dim + 1 :])


def _is_dense(tensor: Tensor, block_dim: int) -> bool:
    expected = 1
    for stride, size in _strides_and_sizes(tensor, range(block_dim + 1, tensor.dim())):
        if stride != expected:
            return False
        expected *= size
    return True


def _overlap(tensor: Tensor, block_dim: int) -> str | None:
    """What is wrong if blocks of the tensor overlap."""
    extent = _block_numel(tensor, block_dim)
    for stride, size in _strides_and_sizes(tensor, range(block_dim + 1)):
        if stride < extent:
            return (
                f"has blocks that overlap: they are {stride} elements apart, but {extent} long; "
                "copy it to memory of its own (an expanded tensor needs .contiguous())"
            )
        extent += stride * (size - 1)
    return None


def _strides_and_sizes(tensor: Tensor, dims: range) -> list[tuple[int, int]]:
    """Stride and size of each dimension with more than one index, innermost in memory first."""
    return sorted((tensor.stride(d), tensor.shape[d]) for d in dims if tensor.shape[d] > 1)


def _slab_bases(tensor: Tensor, block_dim: int) -> Int64Array:
    """int64 [slabs], the address of block 0 in each slab of the tensor."""
    offsets = np.zeros(1, np.int64)
    for dim in range(block_dim):
        steps = np.arange(tensor.shape[dim], dtype=np.int64) * tensor.stride(dim)
        offsets = np.add.outer(offsets, steps).reshape(-1)
    return tensor.data_ptr() + offsets * tensor.element_size()


def block_spaces(layouts: Sequence[Slabs]) -> list[int]:
    """Finds layouts whose blocks are the same memory.

    Hybrid models let several groups of layers use the same tensors in turn, so a block of one group
    may have been a block of another. Returns a number per layout, equal for layouts that share
    their blocks.

    Raises:
        ValueError: layouts share memory, but block i of one is not block i of the other.
    """
    spaces = list(range(len(layouts)))
    for later, layout in enumerate(layouts):
        for earlier, other in enumerate(layouts[:later]):
            shifts = _shifts(other, layout)
            if not shifts.size:
                continue
            if shifts.any():
                raise ValueError(
                    f"layouts {earlier} and {later} share memory, but the same id is not the same "
                    "block in both; make them from the same blocks with the same stride"
                )
            joined, left = spaces[earlier], spaces[later]
            spaces = [joined if space == left else space for space in spaces]
    return spaces


def _shifts(one: Slabs, other: Slabs) -> Int64Array:
    """By how many blocks `other` is ahead of `one`, for each pair of slabs that share bytes.

    1 where the strides differ, so that any nonzero value means the blocks do not coincide.
    """
    ahead = np.subtract.outer(other.bases, one.bases)
    one_extent = (one.num_blocks - 1) * one.strides + one.sizes
    other_extent = (other.num_blocks - 1) * other.strides + other.sizes
    meet = (ahead < one_extent) & (-ahead < other_extent[:, None])
    same_stride = np.equal.outer(other.strides, one.strides)
    # Slabs with interleaved blocks overlap as ranges, but share no byte. A block that begins inside
    # one of the other slab may reach into the next one, too.
    blocks, offset = np.divmod(ahead, one.strides)
    inside = offset < one.sizes
    reaches_next = offset + other.sizes[:, None] > one.strides
    found = [np.ones(np.count_nonzero(meet & ~same_stride), np.int64)]
    for shift, share in ((blocks, inside), (blocks + 1, reaches_next)):
        exist = (-other.num_blocks < shift) & (shift < one.num_blocks)
        found.append(shift[same_stride & share & exist])
    return np.concatenate(found)
