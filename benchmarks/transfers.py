"""Transfers of scattered blocks: their shapes, their ids, and what one costs."""

from __future__ import annotations

import time
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from big_copy import BigCopy
from blocks import NumberedBlocks
from timing import device_us
from torch import Tensor

SHAPES = ("64x32", "160x8", "160x4", "56x16", "61x18", "160x2", "1x2048")
DIRECTIONS = ("store", "load")


@dataclass(frozen=True)
class Shape:
    """Of a block: so many fragments of so many KiB."""

    layers: int
    fragment_kib: int

    @classmethod
    def parse(cls, text: str) -> Shape:
        layers, kib = map(int, text.split("x"))
        return cls(layers, kib)

    @property
    def block_bytes(self) -> int:
        return self.layers * self.fragment_kib * 1024

    def new_blocks(self, device: torch.device, count: int) -> NumberedBlocks:
        return NumberedBlocks(device, count, self.layers, self.fragment_kib * 1024)

    def __str__(self) -> str:
        return f"{self.layers} x {self.fragment_kib} KiB"


def add_shapes(parser: ArgumentParser) -> None:
    text = "of a block, layers x KiB: 64x32"
    parser.add_argument("--shapes", type=Shape.parse, nargs="+", help=text)


def shapes_of(
    options: Namespace, on_cuda: bool, usual: Sequence[str] = SHAPES, on_cpu: int = 2
) -> list[Shape]:
    """Those that were asked for, else the usual ones; without a GPU the last few of them."""
    return options.shapes or list(map(Shape.parse, usual if on_cuda else usual[-on_cpu:]))


@dataclass(frozen=True)
class Kind:
    """Of a transfer."""

    shape: Shape
    direction: str
    blocks: int

    @property
    def nbytes(self) -> int:
        return self.blocks * self.shape.block_bytes

    def __str__(self) -> str:
        return f"{self.direction} of {self.blocks} x ({self.shape})"


@dataclass(frozen=True)
class Move:
    """What one or two transfers at once took, in microseconds: from the first call until all ends
    were seen, and in the calls."""

    total_us: float
    submit_us: float
    copy_method: str


def scattered(blocks: NumberedBlocks, count: int) -> tuple[Tensor, Tensor]:
    """Random distinct blocks and pages; the first and the last of either are never among them."""
    block_ids, page_ids = (1 + torch.randperm(blocks.count - 2)[:count] for _ in range(2))
    return block_ids, page_ids


def submit(
    handler: Any, direction: str, blocks: list[int], pages: list[int], **options: Any
) -> Any:
    if direction == "store":
        return handler.store(gpu_block_ids=blocks, page_ids=pages, **options)
    return handler.load(page_ids=pages, gpu_block_ids=blocks, **options)


class _Group:
    """A transfer of `count` blocks for each direction, which share no block and no page."""

    def __init__(
        self, handler: Any, blocks: NumberedBlocks, directions: Sequence[str], count: int
    ) -> None:
        self._handler = handler
        self._blocks = blocks
        ids = scattered(blocks, len(directions) * count)
        parts = zip(*(of_kind.split(count) for of_kind in ids), strict=True)
        self._ids = dict(zip(directions, parts, strict=True))
        self._lists = [
            (direction, block_ids.tolist(), page_ids.tolist())
            for direction, (block_ids, page_ids) in self._ids.items()
        ]

    def submit(self) -> list[Any]:
        return [submit(self._handler, *one) for one in self._lists]

    def end(self) -> None:
        """All have ended."""
        self._handler.poll()  # forgets the jobs
        for direction, ids in self._ids.items():
            self._blocks.note(direction, *ids)


def move(
    handler: Any,
    blocks: NumberedBlocks,
    directions: Sequence[str],
    count: int,
    poll: bool = False,
) -> Move:
    """Moves scattered blocks, other ones in every call; with two directions both at once. poll:
    looks in a loop, before wait()."""
    group = _Group(handler, blocks, directions, count)
    start = time.perf_counter_ns()
    jobs = group.submit()
    submitted = time.perf_counter_ns()
    while poll and not all(job.query() for job in jobs):
        pass
    handler.synchronize(jobs)
    end = time.perf_counter_ns()
    copy_method = "/".join(sorted({job.result.copy_method for job in jobs}))
    group.end()
    return Move((end - start) / 1e3, (submitted - start) / 1e3, copy_method)


def link_us(
    handler: Any,
    blocks: NumberedBlocks,
    directions: Sequence[str],
    count: int,
    big: BigCopy,
    stream: torch.cuda.Stream,
) -> tuple[float, float] | None:
    """Microseconds on the device of such transfers, and of big copies of as many bytes, given to it
    while the stream is held; None when a hold was over too soon."""
    group = _Group(handler, blocks, directions, count)

    def give() -> None:
        for job in group.submit():
            job.wait()

    ours = device_us(stream, give)
    handler.synchronize()
    group.end()
    nbytes = count * blocks.layout.block_bytes
    beside = device_us(stream, lambda: big.give(directions, nbytes))
    return None if ours is None or beside is None else (ours, beside)
