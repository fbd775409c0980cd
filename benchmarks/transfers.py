"""Transfers of scattered blocks: their shapes, their ids, and what one costs."""

from __future__ import annotations

import time
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from big_copy import Before, nothing
from blocks import ARRANGEMENTS, ONE_BY_ONE, NumberedBlocks
from timing import Move
from torch import Tensor

from torch_kvswap import OffloadHandler

SHAPES = ("160x8", "160x4", "160x2", "64x32")
BLOCKS = (1, 8, 64, 512)
DIRECTIONS = ("store", "load")
BOTH = "both"  # a store and a load at once


@dataclass(frozen=True)
class Shape:
    """Of a block: so many fragments of so many KiB."""

    layers: int
    fragment_kib: int

    @classmethod
    def parse(cls, text: str) -> Shape:
        layers, _, kib = text.partition("x")
        if not (layers.isdecimal() and kib.isdecimal() and int(layers) * int(kib)):
            raise ArgumentTypeError(f"{text!r} is no number of layers x KiB, such as 64x32")
        return cls(int(layers), int(kib))

    @property
    def block_bytes(self) -> int:
        return self.layers * self.fragment_kib * 1024

    def new_blocks(
        self, device: torch.device, count: int, arrangement: str = ONE_BY_ONE
    ) -> NumberedBlocks:
        return NumberedBlocks(device, count, self.layers, self.fragment_kib * 1024, arrangement)

    def __str__(self) -> str:
        return f"{self.layers} x {self.fragment_kib} KiB"


def add_transfers(parser: ArgumentParser) -> None:
    """Options that say which transfers are measured."""
    add = parser.add_argument
    text = "shapes of a block, layers x KiB: 64x32"
    add("--shapes", type=Shape.parse, nargs="+", help=text)
    text = "how the layers lie in memory; default: both"
    add("--arrangements", nargs="+", choices=ARRANGEMENTS, default=list(ARRANGEMENTS), help=text)


def shapes_of(options: Namespace, usual: Sequence[str] = SHAPES) -> list[Shape]:
    """The option --shapes, by default the usual ones; without a GPU the last two of them."""
    return options.shapes or list(map(Shape.parse, usual[0 if options.device == "cuda" else -2 :]))


def blocks_of(options: Namespace) -> list[int]:
    """The option --blocks in order, by default BLOCKS; without a GPU the first two of them."""
    return sorted(set(options.blocks or BLOCKS[: None if options.device == "cuda" else 2]))


@dataclass(frozen=True)
class Kind:
    """Of a transfer, or of two at once.

    arrangement: see blocks.py. direction: one of DIRECTIONS, or BOTH. blocks: in each transfer.
    """

    shape: Shape
    arrangement: str
    direction: str
    blocks: int

    @property
    def directions(self) -> tuple[str, ...]:
        return DIRECTIONS if self.direction == BOTH else (self.direction,)

    @property
    def nbytes(self) -> int:
        """Of each transfer."""
        return self.blocks * self.shape.block_bytes

    def __str__(self) -> str:
        return f"{self.direction} of {self.blocks} x ({self.shape}), {self.arrangement}"


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


def open_handlers(
    blocks: NumberedBlocks, copy_methods: Iterable[str], stack: ExitStack, **options: Any
) -> tuple[dict[str, OffloadHandler], dict[str, str]]:
    """A handler for each copy method, which the stack closes, and why others were refused.
    Without a GPU there is one with "auto" only."""
    opened, refused = {}, {}
    for copy_method in copy_methods if blocks.device.type == "cuda" else ("auto",):
        try:
            handler = OffloadHandler(blocks.layout, blocks.host, copy_method=copy_method, **options)
        except ValueError as error:
            refused[copy_method] = str(error)
        else:
            opened[copy_method] = stack.enter_context(handler)
    return opened, refused


def move(
    handler: Any,
    blocks: NumberedBlocks,
    directions: Sequence[str],
    count: int,
    before: Before = nothing,
) -> Move:
    """Moves scattered blocks, other ones in every call; with two directions both at once."""
    ids = scattered(blocks, len(directions) * count)  # two transfers share no block and no page
    parts = list(zip(directions, *(of_kind.split(count) for of_kind in ids), strict=True))
    lists = [(direction, of.tolist(), pages.tolist()) for direction, of, pages in parts]
    before()
    start = time.perf_counter_ns()
    jobs = [submit(handler, *one) for one in lists]
    submitted = time.perf_counter_ns()
    handler.synchronize(jobs)
    end = time.perf_counter_ns()
    copy_method = "/".join(sorted({job.result.copy_method for job in jobs}))
    handler.poll()  # forgets the jobs
    for part in parts:
        blocks.note(*part)
    return Move((end - start) / 1e3, (submitted - start) / 1e3, copy_method)
