"""Host memory for preempted requests: which pages are free, and what is on its way."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from torch_kvswap.handler import Job, OffloadHandler, TransferError
from torch_kvswap.host_memory import HostPool
from torch_kvswap.layout import Int64Array, PagedLayout


@dataclass(frozen=True)
class Options:
    """path, background: as of `OffloadHandler` and `OffloadHandler.store`. store_bytes: how much of
    a request one store has at most; a batch that takes its first blocks waits for no more."""

    path: str | None = None
    background: bool = True
    store_bytes: int = 32 << 20


@dataclass
class Stored:
    """Where the blocks of one request are: for each group of layers, the pages of its blocks in the
    order of the blocks. stores: the jobs that fill them."""

    pages: list[Int64Array]
    stores: list[Job] = field(default_factory=list)


class Swap:
    """Moves blocks of the layout to host pages and back, one block a page.

    stream: the one that the model runs on, None for a cache on the CPU. Both directions start
    behind what it was given so far, and never hold it up by themselves: who is about to write
    blocks that may still be read or written here calls guard(). For one thread at a time.
    """

    def __init__(
        self,
        layout: PagedLayout,
        num_pages: int,
        stream: torch.cuda.Stream | None,
        options: Options,
    ) -> None:
        self.pool = HostPool(layout, num_pages)
        self.handler = OffloadHandler(layout, self.pool, path=options.path)
        self._stream = stream
        self._background = options.background
        self._part = max(1, options.store_bytes // layout.block_bytes)
        # A stack: pages that were freed together, and lie side by side, are taken together.
        self._free = np.arange(num_pages, dtype=np.int64)[::-1].copy()
        self.num_free = num_pages
        self._busy: list[tuple[Job, Int64Array]] = []
        self._is_written = np.zeros(layout.num_blocks, bool)

    def store(self, groups: Sequence[Int64Array]) -> Stored | None:
        """Starts to store the blocks of a request; None when too few pages are free. Raises what
        `OffloadHandler.store` does; then no page is taken."""
        blocks = np.concatenate(groups)
        if len(blocks) > self.num_free:
            return None
        pages = self._take(len(blocks))
        stored = Stored(np.split(pages, np.cumsum([len(group) for group in groups])[:-1]))
        try:
            for first in range(0, len(blocks), self._part):
                part = slice(first, first + self._part)
                job = self.handler.store(
                    blocks[part], pages[part], after=self._stream, background=self._background
                )
                stored.stores.append(job)
                self._busy.append((job, blocks[part]))
        except BaseException:
            self.free(stored)
            raise
        return stored

    def load(self, stored: Stored, groups: Sequence[Int64Array]) -> Job:
        """Starts to load what is stored into these blocks. A group that has fewer blocks now, or
        more, is loaded as far as both go. The pages stay taken."""
        counts = [min(map(len, pair)) for pair in zip(stored.pages, groups, strict=True)]
        pages = np.concatenate([one[:n] for one, n in zip(stored.pages, counts, strict=True)])
        blocks = np.concatenate([one[:n] for one, n in zip(groups, counts, strict=True)])
        job = self.handler.load(pages, blocks, after=self._stream, background=self._background)
        self._busy.append((job, blocks))
        return job

    def free(self, stored: Stored) -> None:
        """Gives the pages back. Jobs that still use them go on or are cancelled; whatever uses the
        pages next comes behind them."""
        for job in stored.stores:
            self.handler.cancel(job)
        pages = np.concatenate(stored.pages)
        self._free[self.num_free : self.num_free + len(pages)] = pages[::-1]
        self.num_free += len(pages)

    def collect(self) -> None:
        """Forgets the jobs that have ended. Needed before blocks whose load failed are stored."""
        self.handler.finished()
        self._busy = [(job, blocks) for job, blocks in self._busy if not job.done()]

    @property
    def is_busy(self) -> bool:
        return bool(self._busy)

    def guard(self, written: Iterable[Int64Array] | None) -> None:
        """Makes the stream wait for the jobs that read or write one of these blocks; None is any.
        They are not waited for again."""
        arrays = None if written is None else list(written)
        for blocks in arrays or ():
            self._is_written[blocks] = True
        free = []
        for job, blocks in self._busy:
            if arrays is not None and not self._is_written[blocks].any():
                free.append((job, blocks))
            elif not job.done():
                self._wait_on(job)
        self._busy = free
        for blocks in arrays or ():
            self._is_written[blocks] = False

    def wait(self, job: Job) -> None:
        """Blocks the host until the job has ended, well or not: `Job.result` says how."""
        try:
            self.handler.wait(job)
        except TransferError:
            assert job.result is not None

    def reset(self) -> None:
        """Blocks the host until all jobs have ended, and forgets them."""
        self.handler.drain()
        self.collect()

    def _wait_on(self, job: Job) -> None:
        try:
            job.wait_on(self._stream)
        except TransferError:  # it has ended meanwhile, so that there is nothing to wait for
            assert job.done()

    def _take(self, count: int) -> Int64Array:
        first = self.num_free - count
        pages: Int64Array = self._free[first : self.num_free][::-1].copy()
        self.num_free = first
        return pages
