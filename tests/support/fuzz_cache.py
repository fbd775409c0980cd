"""Random paged caches and host pools, with a numpy copy of their bytes that the model updates."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from fuzz_devices import Device
from torch import Tensor

from torch_kvswap import HostPool, PagedLayout
from torch_kvswap.layout import layout_like

GUARD = 64  # bytes before and behind the blocks of a memory
DTYPES = [
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.uint8,
    torch.int8,
    torch.float16,
    torch.float32,
]
Bytes = npt.NDArray[np.uint8]


class MismatchError(AssertionError):
    """A byte is not what the model says."""


class Memory:
    """Bytes on the device or in a pool.

    Attributes:
        raw (Tensor): all of them, uint8, one dimension.
        expected (ndarray): what the model says that they are.
        defined (ndarray): bool, False where a job that failed or was cancelled was to write.
    """

    def __init__(self, raw: Tensor, name: str) -> None:
        self.raw, self.name = raw, name
        self.expected: Bytes = raw.cpu().numpy().copy()
        self.defined = np.ones(len(self.expected), bool)

    def check(self) -> None:
        """Compares all bytes, also those around and between the blocks. Nothing may be running."""
        found = self.raw.cpu().numpy()
        wrong = np.flatnonzero((found != self.expected) & self.defined)
        if wrong.size:
            at = int(wrong[0])
            raise MismatchError(
                f"{self.name}: {wrong.size} of {len(found)} bytes are wrong, the first is byte "
                f"{at}: {found[at]}, expected {self.expected[at]}"
            )


@dataclass(frozen=True)
class Slab:
    """Bytes [offset + i * stride, + size) of a memory are one part of block or slot i. `start`:
    where they begin among the bytes of the block."""

    memory: Memory
    offset: int
    stride: int
    size: int
    start: int
    layer: int = 0

    def span(self, index: int) -> slice:
        begin = self.offset + index * self.stride
        return slice(begin, begin + self.size)

    def view(self, index: int) -> Tensor:
        return self.memory.raw[self.span(index)]

    def row(self, rows: Any, row: int) -> Any:
        """Its part of a row of bytes of whole blocks."""
        return rows[row, self.start : self.start + self.size]


@dataclass(frozen=True)
class TensorShape:
    """lead: dimensions before that of the blocks. inner: those of a block. order: of the inner
    dimensions in memory, the fastest last."""

    dtype: torch.dtype
    lead: tuple[int, ...]
    inner: tuple[int, ...]
    order: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.inner)

    @property
    def nbytes(self) -> int:
        """Of one block, in all slabs."""
        return math.prod(self.lead) * self.numel * self.dtype.itemsize

    @property
    def meaning(self) -> tuple[object, ...]:
        """Equal if the bytes of a block are of the same values."""
        return self.dtype, self.lead, self.inner, [d for d in self.order if self.inner[d] > 1]

    @property
    def inner_strides(self) -> list[int]:
        strides, distance = [0] * len(self.inner), 1
        for dim in reversed(self.order):
            strides[dim], distance = distance, distance * self.inner[dim]
        return strides


@dataclass(frozen=True)
class GroupShape:
    """What stays when a cache moves. shares: the tensors of another group that are its own too, by
    their numbers; then it has no shapes. names: of the tensors are this and their numbers."""

    block_dim: int
    tensors: tuple[TensorShape, ...]
    shares: tuple[int, tuple[int, ...]] | None = None
    as_bytes: bool = False  # of a shared group: the same memory as tensors of uint8
    names: str | None = None

    @property
    def meaning(self) -> tuple[object, ...]:
        """Equal if the bytes of a block are of the same values."""
        return self.names, [tensor.meaning for tensor in self.tensors]


@dataclass(eq=False)
class Group:
    """A layout, with its pool. Block b is `slabs`, slot s of the pool is `slots`."""

    layout: PagedLayout
    slabs: list[Slab]
    num_blocks: int
    space: int
    block_bytes: int
    num_layers: int
    pool: int = field(init=False)
    host: HostPool = field(init=False)
    slots: Slab = field(init=False)

    def slabs_of(self, layer: int | None) -> list[Slab]:
        return [slab for slab in self.slabs if layer is None or slab.layer == layer]


def random_shapes(rng: random.Random, device: Device, num_groups: int) -> list[GroupShape]:
    shapes: list[GroupShape] = []
    for number in range(num_groups):
        if number and rng.random() < 0.35:
            shared = rng.randrange(number)
            if shapes[shared].shares is None:
                count = len(shapes[shared].tensors)
                chosen = sorted(rng.sample(range(count), rng.randint(1, count)))
                if rng.random() < 0.5:
                    chosen = list(range(count))
                block_dim = shapes[shared].block_dim
                as_bytes = rng.random() < 0.5
                shapes.append(GroupShape(block_dim, (), (shared, tuple(chosen)), as_bytes))
                continue
        if number and rng.random() < 0.3 and not (equal := rng.choice(shapes)).shares:
            # Slabs of the same sizes, in memory of their own.
            shapes.append(replace(equal, names=rng.choice([None, "layer", "other"])))
            continue
        block_dim = rng.choice([0, 0, 0, 1, 1, 2])
        tensors = _random_tensors(rng, device, block_dim)
        while sum(tensor.nbytes for tensor in tensors) > device.block_bytes:
            tensors = _random_tensors(rng, device, block_dim)
        shapes.append(GroupShape(block_dim, tensors, names=rng.choice([None, "layer"])))
    return shapes


def _random_tensors(rng: random.Random, device: Device, block_dim: int) -> tuple[TensorShape, ...]:
    layers = rng.choice([1, 1, 2, 2, 3, 5])
    inners = device.large_shapes if rng.random() < 0.3 else device.block_shapes
    if rng.random() < 0.6:
        return (_random_tensor(rng, inners, block_dim),) * layers
    return tuple(_random_tensor(rng, inners, block_dim) for _ in range(layers))


def _random_tensor(
    rng: random.Random, inners: Sequence[tuple[int, ...]], block_dim: int
) -> TensorShape:
    lead = ((), (2,), (2, 2))[block_dim]
    inner = rng.choice(inners)
    order = list(range(len(inner)))
    if rng.random() < 0.3:
        rng.shuffle(order)
    return TensorShape(rng.choice(DTYPES), lead, inner, tuple(order))


def make_groups(
    rng: random.Random, device: Device, shapes: Sequence[GroupShape], num_blocks: Sequence[int]
) -> tuple[list[Group], list[Memory]]:
    """Groups in new memory of random bytes, without pools, arranged at random."""
    groups: list[Group] = []
    memories: list[Memory] = []
    tensors_of: list[list[tuple[Tensor, list[Slab]]]] = []
    for number, (shape, blocks) in enumerate(zip(shapes, num_blocks, strict=True)):
        if shape.shares is None:
            place = _side_by_side if rng.random() < 0.3 else _apart
            made = place(rng, device, shape, blocks, memories, f"group {number}")
            space, block_dim = number, shape.block_dim
        else:
            space, chosen = shape.shares
            made = [tensors_of[space][index] for index in chosen]
            blocks, block_dim = groups[space].num_blocks, shape.block_dim
            if shape.as_bytes:
                made, block_dim = _as_bytes(made, blocks), 0
        tensors_of.append(made)
        slabs: list[Slab] = []
        for layer, (_, of_tensor) in enumerate(made):
            for slab in of_tensor:
                start = sum(other.size for other in slabs)
                where = slab.memory, slab.offset, slab.stride, slab.size
                slabs.append(Slab(*where, start=start, layer=layer))
        tensors: Any = [tensor for tensor, _ in made]
        if shape.names is not None:
            tensors = {f"{shape.names} {place}": tensor for place, tensor in enumerate(tensors)}
        layout = device.layout(tensors, block_dim)
        if shape.shares is None:
            described = layout._describe()
            assert layout_like(described)._describe() == described
            for other, group in zip(shapes, groups, strict=False):
                is_same = other.meaning == shape.meaning
                assert is_same == (group.layout._describe() == described) or other.shares
        block_bytes = sum(slab.size for slab in slabs)
        groups.append(Group(layout, slabs, blocks, space, block_bytes, len(made)))
    return groups, memories


def _apart(
    rng: random.Random,
    device: Device,
    shape: GroupShape,
    blocks: int,
    memories: list[Memory],
    name: str,
) -> list[tuple[Tensor, list[Slab]]]:
    """A memory for each tensor, with padding, K and V one after the other or side by side."""
    made = []
    for index, tensor in enumerate(shape.tensors):
        unit = tensor.numel + rng.choice([0, 0, 0, 1, 3, 16])
        slabs = math.prod(tensor.lead)
        if rng.random() < 0.3:
            distance, block_stride = unit, slabs * unit + rng.choice([0, 0, 5])
            total = blocks * block_stride
        else:
            block_stride = unit
            distance = blocks * unit + rng.choice([0, 0, 7])
            total = slabs * distance
        size = tensor.dtype.itemsize
        memory = _memory(rng, device, total * size, f"{name}, tensor {index}")
        memories.append(memory)
        made.append(_view(tensor, blocks, memory, GUARD, block_stride, distance))
    return made


def _side_by_side(
    rng: random.Random,
    device: Device,
    shape: GroupShape,
    blocks: int,
    memories: list[Memory],
    name: str,
) -> list[tuple[Tensor, list[Slab]]]:
    """One memory in which a block has all tensors, as cross-layer caches do."""
    starts, total = [], 0
    for tensor in shape.tensors:
        starts.append(total)
        total += -(-tensor.nbytes // 8) * 8 + rng.choice([0, 0, 8])
    memory = _memory(rng, device, total * blocks, f"{name}, all tensors")
    memories.append(memory)
    return [
        _view(tensor, blocks, memory, GUARD + start, total // tensor.dtype.itemsize, tensor.numel)
        for tensor, start in zip(shape.tensors, starts, strict=True)
    ]


def _memory(rng: random.Random, device: Device, nbytes: int, name: str) -> Memory:
    generator = torch.Generator().manual_seed(rng.getrandbits(32))
    size = -(-nbytes // 8) * 8 + 2 * GUARD
    raw = torch.randint(256, (size,), dtype=torch.uint8, generator=generator)
    return Memory(device.cache_memory(raw), name)


def _view(
    shape: TensorShape, blocks: int, memory: Memory, offset: int, block_stride: int, distance: int
) -> tuple[Tensor, list[Slab]]:
    """The tensor at this byte of the memory, and where its blocks are. distance: between the
    indices of the dimensions in front, in elements like block_stride."""
    size = shape.dtype.itemsize
    lead_strides = [distance * math.prod(shape.lead[dim + 1 :]) for dim in range(len(shape.lead))]
    tensor = memory.raw.view(shape.dtype).as_strided(
        (*shape.lead, blocks, *shape.inner),
        (*lead_strides, block_stride, *shape.inner_strides),
        offset // size,
    )
    slabs = []
    for index in itertools.product(*map(range, shape.lead)):
        steps = sum(i * step for i, step in zip(index, lead_strides, strict=True))
        place = memory, offset + steps * size, block_stride * size, shape.numel * size
        slabs.append(Slab(*place, start=0))
    return tensor, slabs


def _as_bytes(
    tensors: list[tuple[Tensor, list[Slab]]], blocks: int
) -> list[tuple[Tensor, list[Slab]]]:
    slabs = [slab for _, of_tensor in tensors for slab in of_tensor]
    return [
        (slab.memory.raw.as_strided((blocks, slab.size), (slab.stride, 1), slab.offset), [slab])
        for slab in slabs
    ]


def make_pools(
    rng: random.Random, device: Device, groups: list[Group], least: int
) -> tuple[list[HostPool], list[Memory]]:
    """A pool of at least so many pages for each group, or one for all groups."""
    if len(groups) > 1 and rng.random() < 0.3:
        largest = max(groups, key=lambda group: group.block_bytes)
        pool, memory = _pool(rng, device, largest, 0, least)
        for group in groups:
            own = pool if group is largest else pool.view_for(group.layout)
            _give(group, own, 0, memory)
        return [pool], [memory]
    made = [_pool(rng, device, group, number, least) for number, group in enumerate(groups)]
    for number, (group, (pool, memory)) in enumerate(zip(groups, made, strict=True)):
        _give(group, pool, number, memory)
    return [pool for pool, _ in made], [memory for _, memory in made]


def _pool(
    rng: random.Random, device: Device, group: Group, number: int, least: int
) -> tuple[HostPool, Memory]:
    per_page = rng.choice([1, 1, 1, 2, 3])
    gap = rng.choice([0, 0, 100])
    pool = device.pool(group.layout, rng.randint(least, least + 7), per_page, gap)
    generator = torch.Generator().manual_seed(rng.getrandbits(32))
    raw = pool._memory.mapping.tensor  # with what lies between the slots
    raw.copy_(torch.randint(256, raw.shape, dtype=torch.uint8, generator=generator))
    return pool, Memory(raw, f"pool {number}")


def _give(group: Group, host: HostPool, number: int, memory: Memory) -> None:
    group.host, group.pool = host, number
    group.slots = Slab(
        memory, 0, host.page_bytes // host.blocks_per_page, group.block_bytes, start=0
    )
