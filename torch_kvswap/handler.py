"""What a server holds: stores and loads between a paged cache and host pages, as jobs."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence

from torch_kvswap._native import abi
from torch_kvswap._native.arguments import NotCopyable, read_timeout
from torch_kvswap._native.handler import NativeHandler
from torch_kvswap._native.ids import Ids
from torch_kvswap._native.submit import Request
from torch_kvswap.after import After
from torch_kvswap.copy_method import path_options
from torch_kvswap.gate import Gate
from torch_kvswap.groups import Groups
from torch_kvswap.host_pool.pool import HostPool
from torch_kvswap.job import Job, wait_for
from torch_kvswap.layout import PagedLayout
from torch_kvswap.metrics import Metrics
from torch_kvswap.nvtx import Ranges
from torch_kvswap.result import Result, TransferError, direction_of

__all__ = ["Job", "OffloadHandler", "Result", "TransferError"]


class OffloadHandler(NotCopyable):
    """Stores blocks of a paged cache into host pages and loads them back, without blocking.

    gpu: the cache. host: pages for the same planes. A hybrid model has a list of layouts, one for
    each group of layers, and a pool for each; then every argument with ids is a list too, with an
    entry for each group, empty for those that have no blocks in the job. The handler holds all of
    it while it lives. Stores run in the order of submission, loads too, expedited loads too, and so
    do two jobs that share a block or a page which one of them writes; others overlap.

    path: "auto", the default, takes for each transfer the way of copying that is predicted to end
    first; "strided", "batch", "staged" or "kernel" is taken always, and KVSWAP_PATH says which
    where no path is given (`Result.path` names them). staging_bytes: GPU memory for staged copies,
    half for stores, half for loads, taken at once where some transfer could be staged. threaded: a
    thread for each channel gives all copies to the driver, 40 to 250 us after it was woken up.

    Any thread may call any method, but a signal handler or a __del__ none: it can run inside of
    another call, whose lock it would wait for. A context manager, which closes it. One that is
    dropped or left open at exit is closed. In a forked child every call raises RuntimeError. With a
    cache on the CPU the same calls copy before they return. docs/ordering.md has the rules. Raises
    ValueError when gpu and host differ.
    """

    def __init__(
        self,
        gpu: PagedLayout | Sequence[PagedLayout],
        host: HostPool | Sequence[HostPool],
        *,
        path: str | None = None,
        staging_bytes: int = 32 << 20,
        threaded: bool = False,
    ) -> None:
        groups = Groups(gpu, host)
        self._ranges = Ranges()
        paths = path_options(path, staging_bytes, groups.device)
        self.native = NativeHandler(groups, threaded, paths)
        # Holds the cache and pools: neither may go before the jobs have ended.
        weakref.finalize(self, self.native.destroy, weakref.ref(self))
        for pool in groups.pools:
            pool.used_by(self)

    @property
    def layouts(self) -> tuple[PagedLayout, ...]:
        return self.native.groups.layouts

    @property
    def pools(self) -> tuple[HostPool, ...]:
        return self.native.groups.pools

    def store(
        self,
        gpu_block_ids: Ids | Sequence[Ids],
        page_ids: Ids | Sequence[Ids],
        *,
        first_block: int | Sequence[int] = 0,
        after: After = None,
        background: bool = False,
    ) -> Job:
        """Copies GPU block gpu_block_ids[j] to host page page_ids[(first_block + j) // k], slot
        (first_block + j) % k, where k is host.blocks_per_page; the last page may be part used.

        Ids: 1-D lists, numpy arrays or CPU tensors of integers, copied before this returns.
        after: the copy starts behind all that was given so far to this stream, or behind this
        event; None is the calling thread's current stream on the cache's device (the kernels that
        wrote the blocks), () is nothing. Until the job has ended nobody may write the blocks or
        touch the pages, but for work on a stream that waits for it (`Job.wait_on`). background:
        only copy engines copy, so that kernels beside are slowed down no more than by one big copy,
        but their launches may wait, since the driver is busier; the copy may take longer.

        Wrong arguments raise (IndexError, TypeError, ValueError), as do a closed handler, a lost
        device and a stream that is being captured into a CUDA graph (RuntimeError), and too little
        host memory (MemoryError): then there is no job. Any other failure ends the job that is
        returned as failed. A store fails when a load was to fill one of its blocks and failed or
        was cancelled, unless finished() has said so.
        """
        ids = gpu_block_ids, page_ids, first_block
        request = Request(self.native, abi.STORES, *ids, after, background=background)
        return self._submit(request)

    def load(
        self,
        page_ids: Ids | Sequence[Ids],
        gpu_block_ids: Ids | Sequence[Ids],
        *,
        first_block: int | Sequence[int] = 0,
        after: After = None,
        layer_groups: int | None = None,
        expedited: bool = False,
        gate: Gate | None = None,
        background: bool = False,
    ) -> Job:
        """store() the other way round, from page_ids to gpu_block_ids. What `after` says is what
        read or wrote the GPU blocks before. Whoever uses the loaded blocks waits for the job.

        A load fails when a store was to fill one of its pages and failed or was cancelled: such a
        page is invalid until it is stored again.

        layer_groups: the layers are moved group after group, and `Job.wait_layer` waits for one of
        them. expedited: goes ahead of the loads that are queued or running, in a channel of its
        own. gate: is closed, in the order of the current stream, until the load has landed; it has
        as many parts as there are layer groups. Returns when the load is on the device.
        """
        channel = abi.EXPEDITED if expedited else abi.LOADS
        ids = gpu_block_ids, page_ids, first_block
        request = Request(self.native, channel, *ids, after, layer_groups, gate, background)
        return self._submit(request)

    def finished(self) -> list[Result]:
        """The jobs that have ended since the last call, each job in one call only, in the order in
        which they ended. Waits for nothing. Call it now and then: until then the handler remembers
        every job's result, in 120 bytes each."""
        for result in (results := self.native.finished()):
            self._ranges.end(result.job_id)
        return results

    def wait(self, jobs: Job | Iterable[Job] | None = None, timeout: float | None = None) -> None:
        """Blocks the host until the jobs have ended; finished() still reports them.

        jobs: None is every job that finished() has not reported. timeout: seconds, None is for
        ever; signals are handled meanwhile. Raises TransferError with every one of them that failed
        or was cancelled, TimeoutError when some still run after the timeout, ValueError for a job
        of another handler.
        """
        own = None if jobs is None else [self._own(job) for job in _several(jobs)]
        wait_for(self.native, own, read_timeout("timeout", timeout))

    def cancel(self, job: Job) -> bool:
        """Whether the job is, or will be, reported as cancelled; False when it has ended before.

        A job that is queued ends at once and copies nothing. One that the driver has runs to its
        end; what it wrote is undefined. Pages that a cancelled store was to fill are invalid. Takes
        one job: TypeError for a list."""
        return self.native.cancel(self._own(job))

    def gate(self, parts: int = 1) -> Gate:
        """A gate, open, with this many parts: 1 to the number of tensors of the cache."""
        return Gate(self.native, parts)

    def metrics(self) -> Metrics:
        """What the handler has done and has to do, now."""
        return self.native.metrics()

    def rebind(self, gpu: PagedLayout | Sequence[PagedLayout]) -> None:
        """Drains, and goes on with a cache that has moved: new layouts, with blocks of the same
        sizes. Raises ValueError when they differ, RuntimeError when another thread submits
        meanwhile or the driver refuses what the new cache needs; then the old cache stays."""
        self.drain()
        self.native.rebind(self.native.groups.moved_to(gpu))

    def drain(self) -> None:
        """Blocks the host until every job submitted so far has ended, well or not."""
        self.native.wait(None, None)

    def close(self) -> None:
        """Takes no more jobs, drains, lets threads, streams and events go. finished() still reports
        what it has not reported yet. Idempotent; returns at once when the device is lost. Ctrl-C
        interrupts the wait: no more jobs are taken then, and another close() goes on."""
        self.native.close()

    def __enter__(self) -> OffloadHandler:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _submit(self, request: Request) -> Job:
        if not self._ranges.enabled:
            return Job(self, *self.native.submit(request))
        with self._ranges.submit(direction_of(request.native.channel)):
            job = Job(self, *self.native.submit(request))
        self._ranges.begin(job.id, job.direction, job.nbytes)
        return job

    def _own(self, job: object) -> Job:
        if not isinstance(job, Job):
            raise TypeError(f"store() and load() return Jobs, not {job!r}")
        if job.handler is not self:
            raise ValueError(f"{job.direction} {job.id} is of another handler")
        return job


def _several(jobs: Job | Iterable[Job]) -> Iterable[Job]:
    return jobs if isinstance(jobs, Iterable) else [jobs]
