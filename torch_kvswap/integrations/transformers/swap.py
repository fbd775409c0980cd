"""Copies of preempted requests in host memory: free pages, and copies in flight."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain

import torch

from torch_kvswap.handler import Job, OffloadHandler, TransferError
from torch_kvswap.host_pool.encoding import EncodingName
from torch_kvswap.host_pool.pool import HostPool
from torch_kvswap.layout import PagedLayout

# A request is stored in parts. The first has at most FIRST_PART_BYTES, and each further part is
# GROWTH times as large: 1 GiB takes only four calls, and a batch that reuses the first blocks of
# such a request waits for 32 MiB, 0.6 ms, instead of 20 ms.
FIRST_PART_BYTES = 32 << 20
GROWTH = 4


@dataclass(frozen=True)
class Options:
    """Copy options.

    Attributes:
        copy_method (str | None): see OffloadHandler.
        copy_engines_only (bool): see OffloadHandler.store().
        encoding (str): see HostPool.
        bits_per_value (float | None): see HostPool.
    """

    copy_method: str | None = None
    copy_engines_only: bool = False
    encoding: EncodingName = "raw"
    bits_per_value: float | None = None

    def page_bytes(self, layout: PagedLayout) -> int:
        """Bytes of a host page, which holds one unit."""
        return HostPool.page_bytes_of(
            layout, encoding=self.encoding, bits_per_value=self.bits_per_value
        )


@dataclass
class Stored:
    """Where the blocks of a request are stored.

    Attributes:
        pages (list[Sequence[int]]): for each group of layers, the pages of its blocks, in order.
        stores (list[Job]): the jobs that fill the pages.
    """

    pages: list[Sequence[int]]
    stores: list[Job] = field(default_factory=list)


class Swap:
    """Copies units of a layout to host pages and back, one unit per page.

    Stores and loads wait for all work submitted to the model's stream so far. The stream itself
    never waits: call guard() before work that writes units which are still being copied. Not thread
    safe.

    Args:
        layout (PagedLayout): the cache.
        num_pages (int): host pages.
        stream (torch.cuda.Stream | None): the stream of the model; None for a cache on the CPU.
        options (Options): copy options.
    """

    def __init__(
        self,
        layout: PagedLayout,
        num_pages: int,
        stream: torch.cuda.Stream | None,
        options: Options,
    ) -> None:
        self.pool = HostPool(
            layout, num_pages, encoding=options.encoding, bits_per_value=options.bits_per_value
        )
        # The calling thread also launches the model's kernels, so it should not submit copies.
        self.handler = OffloadHandler(
            layout, self.pool, copy_method=options.copy_method, submit_thread=True
        )
        self._stream = stream
        self._copy_engines_only = options.copy_engines_only
        self._part = max(1, FIRST_PART_BYTES // layout.block_bytes)
        # A stack: pages that were freed together are adjacent, and are taken together again.
        self._free = list(range(num_pages))[::-1]
        self._busy: list[tuple[Job, set[int]]] = []  # jobs with the units that they read or write

    @property
    def num_free(self) -> int:
        """Number of free pages."""
        return len(self._free)

    def store(self, groups: Sequence[Sequence[int]]) -> Stored | None:
        """Starts to store the blocks of a request.

        Args:
            groups: units of each group of layers.

        Returns:
            Stored | None: None if too few pages are free.

        Raises:
            Exception: see OffloadHandler.store(). No page is taken then.
        """
        blocks = list(chain.from_iterable(groups))
        if len(blocks) > len(self._free):
            return None
        self.collect()
        pages = self._take(len(blocks))
        stored = Stored(_split(pages, groups))
        begin, size = 0, self._part
        try:
            while begin < len(blocks):
                part = slice(begin, begin + size)
                job = self.handler.store(
                    gpu_block_ids=blocks[part],
                    page_ids=pages[part],
                    after=self._stream,
                    copy_engines_only=self._copy_engines_only,
                )
                stored.stores.append(job)
                self._add(job, blocks[part])
                begin, size = begin + size, GROWTH * size
        except BaseException:
            self.discard(stored)
            raise
        return stored

    def load(self, stored: Stored, groups: Sequence[Sequence[int]]) -> Job:
        """Starts to load stored blocks into these units. The pages stay taken.

        If a group has another number of units than at the store, the smaller number is loaded.
        """
        pages: list[int] = []
        blocks: list[int] = []
        for held, wanted in zip(stored.pages, groups, strict=True):
            count = min(len(held), len(wanted))
            pages += held[:count]
            blocks += wanted[:count]
        job = self.handler.load(
            page_ids=pages,
            gpu_block_ids=blocks,
            after=self._stream,
            copy_engines_only=self._copy_engines_only,
        )
        self._add(job, blocks)
        return job

    def free(self, stored: Stored) -> None:
        """Frees the pages. The handler orders later jobs on them behind the running ones."""
        self._free += chain.from_iterable(reversed(pages) for pages in reversed(stored.pages))

    def discard(self, stored: Stored) -> None:
        """Frees pages whose contents are not needed, and cancels stores that have not started."""
        for job in stored.stores:
            self.handler.cancel(job)
        self.free(stored)

    def collect(self) -> None:
        """Finds out which jobs have ended, for `Job.result`, and lets the handler forget them.

        Needed before blocks of a failed load are stored. Asks the device for all jobs at once,
        which takes tens of microseconds.
        """
        self.handler.poll()
        self._busy = [busy for busy in self._busy if busy[0].result is None]

    def guard(self, written: Iterable[int] | None) -> None:
        """Makes the stream wait for the jobs that read or write these units.

        The stream waits for each job only once.

        Args:
            written (Iterable[int] | None): the units; None is all. Not iterated if no job may be
                running.
        """
        if not self._busy:
            return
        wanted = None if written is None else set(written)

        def conflicts(blocks: set[int]) -> bool:
            return wanted is None or not blocks.isdisjoint(wanted)

        if not any(conflicts(blocks) for _, blocks in self._busy):
            return
        self.collect()
        for job, blocks in self._busy:
            if conflicts(blocks):
                self._make_stream_wait(job)
        self._busy = [busy for busy in self._busy if not conflicts(busy[1])]

    def wait(self, job: Job) -> None:
        """Blocks the host until the job has ended. `Job.result` then has the outcome."""
        try:
            self.handler.synchronize(job)
        except TransferError:
            assert job.result is not None

    def reset(self) -> None:
        """Blocks the host until all jobs have ended, and forgets them."""
        with suppress(TransferError):  # Job.result says which have failed
            self.handler.synchronize()
        self.collect()

    def _make_stream_wait(self, job: Job) -> None:
        try:
            job.wait(self._stream)
        except TransferError:  # the job has already ended, so there is nothing to wait for
            assert job.query()

    def _add(self, job: Job, blocks: Sequence[int]) -> None:
        self._busy.append((job, set(blocks)))

    def _take(self, count: int) -> list[int]:
        first = len(self._free) - count
        pages = self._free[first:][::-1]
        del self._free[first:]
        return pages


def _split(pages: list[int], groups: Sequence[Sequence[int]]) -> list[Sequence[int]]:
    """The pages of each group, as many as it has units."""
    parts: list[Sequence[int]] = []
    begin = 0
    for blocks in groups:
        parts.append(pages[begin : begin + len(blocks)])
        begin += len(blocks)
    return parts
