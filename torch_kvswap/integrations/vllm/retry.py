"""Repeats a failed transfer with plain copies."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from torch_kvswap.handler import Direction
from torch_kvswap.integrations.vllm.layout import Move
from torch_kvswap.layout import PagedLayout


class Retry:
    """Copies block by block and tensor by tensor with torch, without the handler.

    Uses its own stream, which waits for the current stream, and thus for the kernels that wrote the
    blocks. Never raises: `error` has the problem once has_ended() is true.

    Args:
        layouts (Sequence[PagedLayout]): the groups, with one slab per tensor.
        pages (Tensor): uint8 [pages, slots, bytes].
        direction (str): "store" or "load".
        move (Move): what to copy.

    Attributes:
        direction (str): as given.
        error (Exception | None): why it failed.
        seconds (float): time until has_ended() or wait() saw the end.
        nbytes (int): bytes to copy.
    """

    def __init__(
        self, layouts: Sequence[PagedLayout], pages: Tensor, direction: Direction, move: Move
    ) -> None:
        self.direction = direction
        self.error: Exception | None = None
        self.seconds = 0.0
        sizes = [layout.block_bytes for layout in layouts]
        self.nbytes = sum(len(ids) * size for ids, size in zip(move.blocks, sizes, strict=True))
        self._began = time.perf_counter()
        self._end: torch.cuda.Event | None = None
        try:
            self._start(layouts, pages, move)
        except Exception as error:
            self.error = error

    def has_ended(self) -> bool:
        """Whether the copies have ended; does not wait."""
        try:
            ended = self.error is not None or self._end is None or self._end.query()
        except Exception as error:
            self.error, ended = error, True
        if ended and not self.seconds:
            self.seconds = time.perf_counter() - self._began
        return bool(ended)

    def wait(self) -> None:
        """Blocks the host until the copies have ended."""
        try:
            if self._end is not None:
                self._end.synchronize()
        except Exception as error:
            self.error = error
        self.has_ended()

    def _start(self, layouts: Sequence[PagedLayout], pages: Tensor, move: Move) -> None:
        device = layouts[0].device
        if device.type == "cpu":
            self._copy(layouts, pages, move)
            return
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            self._copy(layouts, pages, move)
            self._end = torch.cuda.Event()
            self._end.record(stream)

    def _copy(self, layouts: Sequence[PagedLayout], pages: Tensor, move: Move) -> None:
        for on_gpu, on_host in _rows(layouts, pages, move):
            target, source = (on_host, on_gpu) if self.direction == "store" else (on_gpu, on_host)
            target.copy_(source, non_blocking=True)


def _rows(
    layouts: Sequence[PagedLayout], pages: Tensor, move: Move
) -> Iterator[tuple[Tensor, Tensor]]:
    """The bytes on the GPU and on the host, of each block and tensor."""
    slots = pages.shape[1]
    for layout, blocks, of_pages, first in zip(layouts, *move, strict=True):
        for place, block in enumerate(blocks.tolist(), first):
            row, begin = pages[of_pages[place // slots], place % slots], 0
            for tensor in layout.tensors:
                on_gpu = tensor[block].view(torch.uint8)
                yield on_gpu, row[begin : begin + len(on_gpu)]
                begin += len(on_gpu)
