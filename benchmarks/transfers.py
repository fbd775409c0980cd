"""Transfers of scattered blocks: their shapes, their ids, and what one costs."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from blocks import NumberedBlocks
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
    """One transfer, in microseconds: from the call until its end was seen, in the call, and on the
    device without all that comes before."""

    total_us: float
    submit_us: float
    copy_us: float
    path: str


def scattered(blocks: NumberedBlocks, count: int) -> tuple[Tensor, Tensor]:
    """Random distinct blocks and pages; the first and the last of either are never among them."""
    block_ids, page_ids = (1 + torch.randperm(blocks.count - 2)[:count] for _ in range(2))
    return block_ids, page_ids


def submit(
    handler: Any, direction: str, blocks: list[int], pages: list[int], **options: Any
) -> Any:
    if direction == "store":
        return handler.store(blocks, pages, **options)
    return handler.load(pages, blocks, **options)


def move(
    handler: Any, blocks: NumberedBlocks, direction: str, count: int, poll: bool = False
) -> Move:
    """Moves scattered blocks, other ones in every call. poll: looks in a loop, before wait()."""
    block_ids, page_ids = scattered(blocks, count)
    sources, targets = block_ids.tolist(), page_ids.tolist()
    start = time.perf_counter_ns()
    job = submit(handler, direction, sources, targets)
    submitted = time.perf_counter_ns()
    while poll and not job.done():
        pass
    handler.wait(job)
    end = time.perf_counter_ns()
    result = job.result
    handler.finished()  # forgets the job
    blocks.note(direction, block_ids, page_ids)
    total_us, submit_us = (end - start) / 1e3, (submitted - start) / 1e3
    return Move(total_us, submit_us, result.copy_seconds * 1e6, result.path)
