"""Copies of preempted requests in host memory: free pages, and copies in flight."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import torch

from torch_kvswap.copy_method import AUTO, DEFAULT_STAGING_BYTES
from torch_kvswap.encoding.slot import EncodingName, VerifyName
from torch_kvswap.host_pool.pool import HostPool
from torch_kvswap.layout import PagedLayout
from torch_kvswap.offload.handler import Job, OffloadHandler
from torch_kvswap.results import TransferError

# A request is stored in parts. The first has at most FIRST_PART_BYTES, and each further part is
# GROWTH times as large: 1 GiB takes only four calls, and a batch that reuses the first blocks of
# such a request waits for 32 MiB, 0.6 ms, instead of 20 ms.
FIRST_PART_BYTES = 32 << 20
GROWTH = 4
# Submitted jobs after which poll() is called, so that the handler can forget those that have ended:
# a poll takes as long as submitting a job.
UNREPORTED_JOBS = 64


@dataclass(frozen=True)
class SwapOptions:
    """Copy options.

    Attributes:
        copy_method, staging_bytes: see OffloadHandler.
        encoding, verify: see HostPool.
    """

    copy_method: str = AUTO
    staging_bytes: int = DEFAULT_STAGING_BYTES
    encoding: EncodingName = "raw"
    verify: VerifyName = "off"

    def page_bytes(self, layout: PagedLayout) -> int:
        """Bytes of a host page, which holds one unit."""
        return HostPool.page_bytes_of(layout, encoding=self.encoding)


@dataclass(eq=False)
class Copy:
    """A store or load that was submitted.

    Attributes:
        job (Job): the job.
        is_exposed (bool): whether a batch may write the units before the copy has ended. The units
            of a store are free. Those of a load belong to a request that is in no batch, until it
            gives them away.
        ok (bool | None): whether a load is done or has failed, once Swap.collect() has seen it.
    """

    job: Job
    is_exposed: bool
    ok: bool | None = None


@dataclass
class Stored:
    """Where the blocks of a request are stored.

    Attributes:
        pages (list[array[int]]): for each group of layers, the pages of its blocks, in order.
        stores (list[Job]): the jobs that fill the pages.
    """

    pages: list[array[int]]
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
        options (SwapOptions): copy options.
    """

    def __init__(
        self,
        layout: PagedLayout,
        num_pages: int,
        stream: torch.cuda.Stream | None,
        options: SwapOptions,
    ) -> None:
        self.pool = HostPool(
            layout,
            num_pages,
            encoding=options.encoding,
            verify=options.verify,
        )
        # The calling thread also launches the model's kernels, so it should not submit copies.
        self.handler = OffloadHandler(
            layout,
            self.pool,
            copy_method=options.copy_method,
            staging_bytes=options.staging_bytes,
            submit_thread=True,
        )
        self._stream = stream
        self._part = max(1, FIRST_PART_BYTES // layout.block_bytes)
        # A stack: pages that were freed together are adjacent, and are taken together again.
        self._free = array("q", range(num_pages))
        self._busy: list[Copy] = []  # not seen to end
        self._num_unreported = 0  # jobs since the last poll()

    def store(self, groups: Sequence[Sequence[int]]) -> Stored | None:
        """Starts to store the blocks of a request.

        Args:
            groups: units of each group of layers.

        Returns:
            Stored | None: None if too few pages are free.

        Raises:
            Exception: see OffloadHandler.store(). No page is taken then.
        """
        units = array("q")
        ends = []
        for of_group in groups:
            units.extend(array("q", of_group))
            ends.append(len(units))
        if len(units) > len(self._free):
            return None
        if any(copy.job.direction == "load" for copy in self._busy):
            self.collect()  # the units of a failed load cannot be stored before it was reported
        first = len(self._free) - len(units)
        pages = self._free[first:]
        del self._free[first:]
        stored = Stored([pages[begin:end] for begin, end in zip([0, *ends], ends, strict=False)])
        begin, size = 0, self._part
        try:
            while begin < len(units):
                part = units[begin : begin + size]
                job = self.handler.store(
                    gpu_block_ids=part,
                    page_ids=pages[begin : begin + size],
                    after=self._stream,
                )
                stored.stores.append(job)
                self._busy.append(Copy(job, is_exposed=True))
                begin, size = begin + size, GROWTH * size
        except BaseException:
            self.discard(stored)
            raise
        return stored

    def load(self, stored: Stored, groups: Sequence[Sequence[int]]) -> Copy:
        """Starts to load stored blocks into these units. The pages stay taken.

        If a group has another number of units than at the store, the smaller number is loaded.
        """
        pages, units = array("q"), array("q")
        for held, wanted in zip(stored.pages, groups, strict=True):
            count = min(len(held), len(wanted))
            pages.extend(held[:count])
            units.extend(array("q", wanted[:count]))
        job = self.handler.load(
            page_ids=pages,
            gpu_block_ids=units,
            after=self._stream,
        )
        load = Copy(job, is_exposed=False)
        self._busy.append(load)
        return load

    def free(self, stored: Stored) -> None:
        """Frees the pages. The handler orders later jobs on them behind the running ones."""
        for pages in stored.pages:
            self._free.extend(pages)

    def discard(self, stored: Stored) -> None:
        """Frees pages whose contents are not needed, and cancels stores that have not started."""
        for job in stored.stores:
            self.handler.cancel(job)
        self.free(stored)

    def collect(self) -> None:
        """Finds out which copies have ended, and which loads among them have failed."""
        running, has_failed = [], False
        for copy in self._busy:
            if not copy.job.query():
                running.append(copy)
                continue
            self._num_unreported += 1
            if copy.job.direction == "load":
                copy.ok = copy.job._is_done
                has_failed |= not copy.ok
        self._busy = running
        if has_failed or self._num_unreported >= UNREPORTED_JOBS:
            self.handler.poll()
            self._num_unreported = 0

    def guard(self, written: Iterable[int] | None) -> None:
        """Makes the stream wait for the exposed copies that read or write these units.

        The stream waits for each copy only once.

        Args:
            written (Iterable[int] | None): the units; None is all. Not iterated if no such copy
                runs.
        """
        if not any(copy.is_exposed for copy in self._busy):
            return
        self.collect()
        exposed = [copy for copy in self._busy if copy.is_exposed]
        if exposed and written is not None:
            using = self.handler.jobs_using(array("q", written))
            exposed = [copy for copy in exposed if copy.job in using]
        for copy in exposed:
            self._make_stream_wait(copy.job)
            copy.is_exposed = False

    def wait(self, load: Copy) -> None:
        """Blocks the host until a load has ended. collect() then sets Copy.ok."""
        with suppress(TransferError):  # Copy.ok says that it has failed
            self.handler.synchronize(load.job)

    def reset(self) -> None:
        """Blocks the host until all copies have ended, and forgets them."""
        with suppress(TransferError):  # nobody needs a failed copy
            self.handler.synchronize()
        self.handler.poll()
        self._busy, self._num_unreported = [], 0

    def _make_stream_wait(self, job: Job) -> None:
        job.wait(self._stream)
