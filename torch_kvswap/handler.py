"""What a server holds: stores and loads between a paged cache and host pages, as jobs."""

from __future__ import annotations

import itertools
import threading
import time
import warnings
import weakref
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from functools import partial

import torch

from torch_kvswap.channel import Channel
from torch_kvswap.device import open_device
from torch_kvswap.hazards import Hazards
from torch_kvswap.host_memory import HostPool
from torch_kvswap.job import Job
from torch_kvswap.layout import PagedLayout
from torch_kvswap.ops import swap_blocks_batch
from torch_kvswap.plan import CopyPlan, Ids, plan_load, plan_store
from torch_kvswap.process import Process
from torch_kvswap.transfer import Result, TransferError

__all__ = ["Job", "OffloadHandler", "Result", "TransferError"]

After = torch.cuda.Stream | torch.cuda.Event | tuple[()] | None


class OffloadHandler:
    """Stores blocks of a paged cache into host pages and loads them back, without blocking.

    gpu: the cache. host: pages for the same planes. The handler holds both while it lives. Stores
    run in the order of submission, loads too, and a store and a load that share a block or a page
    run in the order of submission as well; others overlap.

    Any thread may call any method, but no __del__ and no signal handler: they can run inside of
    another call, whose lock they would wait for. A context manager, which closes it. One that is
    dropped or left open at exit is closed. In a forked child, and while the caller's current stream
    is captured in a CUDA graph, every call raises RuntimeError. With a cache on the CPU the same
    calls copy before they return. docs/ordering.md has the rules. Raises ValueError when gpu and
    host differ.
    """

    def __init__(self, gpu: PagedLayout, host: HostPool) -> None:
        _check_match(gpu, host)
        self.gpu = gpu
        self.host = host
        self._hazards = Hazards(gpu.num_blocks, host.num_pages)
        self._lock = threading.RLock()
        device = open_device(gpu.device)
        ids = itertools.count()
        with ExitStack() as undo:
            self._stores = Channel("store", device, ids, self._lock)
            undo.callback(self._stores.close)
            self._loads = Channel("load", device, ids, self._lock)
            undo.callback(self._loads.close)
            self._channels = (self._stores, self._loads)
            host.attach(self)
            undo.pop_all()
        # Holds the cache and the pool too: neither may go before the channels have drained.
        self._finalizer = weakref.finalize(self, _close, self._channels, (gpu, host), Process())

    def store(
        self, gpu_block_ids: Ids, page_ids: Ids, *, first_block: int = 0, after: After = None
    ) -> Job:
        """Copies GPU block gpu_block_ids[j] to host page page_ids[(first_block + j) // k], slot
        (first_block + j) % k, where k is host.blocks_per_page; the last page may be part used.

        Ids: 1-D lists, numpy arrays or CPU tensors of integers, copied before this returns.
        after: the copy starts behind all that was given so far to this stream, or behind this
        event; None is the calling thread's current stream on the cache's device (the kernels that
        wrote the blocks), () is nothing. Until the job has ended nobody may write the blocks or
        touch the pages, but for work on a stream that waits for it (`Job.wait_on`).

        Wrong arguments raise (IndexError, TypeError, ValueError), as do a closed handler and a
        lost device (RuntimeError): then there is no job. Any other failure ends the job that is
        returned as failed.
        """
        began = time.perf_counter()
        plan = plan_store(self.gpu, self.host, gpu_block_ids, page_ids, first_block)
        return self._submit(self._stores, plan, after, began)

    def load(
        self, page_ids: Ids, gpu_block_ids: Ids, *, first_block: int = 0, after: After = None
    ) -> Job:
        """store() the other way round, from page_ids to gpu_block_ids. What `after` says is what
        read or wrote the GPU blocks before. Whoever uses the loaded blocks waits for the job."""
        began = time.perf_counter()
        plan = plan_load(self.gpu, self.host, gpu_block_ids, page_ids, first_block)
        return self._submit(self._loads, plan, after, began)

    def finished(self) -> list[Result]:
        """The jobs that have ended since the last call, each job in one call only, in the order of
        submission within a direction. Waits for nothing. Call it now and then: until then the
        handler remembers every job."""
        for channel in self._channels:
            channel.poll()
        return [result for channel in self._channels for result in channel.take_results()]

    def wait(self, jobs: Job | Iterable[Job] | None = None, timeout: float | None = None) -> None:
        """Blocks the host until the jobs have ended; finished() still reports them.

        jobs: None is every job that finished() has not reported. timeout: seconds, None is for
        ever. Raises TransferError with every one of them that failed, TimeoutError when some still
        run after the timeout, ValueError for a job of another handler.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        if jobs is None:
            jobs = self._unreported()
        jobs = [jobs] if isinstance(jobs, Job) or not isinstance(jobs, Iterable) else list(jobs)
        for job in jobs:
            if not isinstance(job, Job):
                raise TypeError(f"store() and load() return Jobs to wait for, not {job!r}")
            if job.handler is not self:
                raise ValueError(f"{job.direction} {job.id} is of another handler")
        running = [job for job in jobs if not job._channel.wait(job._transfer, deadline)]
        if running:
            names = ", ".join(f"{job.direction} {job.id}" for job in running)
            raise TimeoutError(f"after {timeout} s these jobs still run: {names}")
        failed = [job.result for job in jobs if job.result is not None and not job.result.ok]
        if failed:
            raise TransferError(failed) from failed[0].error

    def drain(self) -> None:
        """Blocks the host until every job submitted so far has ended, ok or failed."""
        for channel in self._channels:
            channel.drain()

    def close(self) -> None:
        """Takes no more jobs, drains, lets streams and events go. finished() still reports what
        it has not reported yet. Idempotent; returns at once when the device is lost."""
        with ExitStack() as both:
            for channel in self._channels:
                both.callback(channel.close)
        self._finalizer.detach()

    def __enter__(self) -> OffloadHandler:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _submit(self, channel: Channel, plan: CopyPlan, after: After, began: float) -> Job:
        self.gpu.check_unmoved()
        copy = partial(swap_blocks_batch, plan.src_ptrs, plan.dst_ptrs, plan.sizes)
        direction, touched = channel.direction, (plan.blocks, plan.pages)
        other = self._loads if channel is self._stores else self._stores
        with self._lock:  # nothing comes between the look and the submission
            behind = other.running(self._hazards.latest_before(direction, *touched))
            transfer = channel.submit(copy, plan.nbytes, after, behind, began)
            if transfer.result is None:
                self._hazards.note(direction, transfer.id, *touched)
        return Job(self, channel, transfer)

    def _unreported(self) -> list[Job]:
        return [Job(self, channel, t) for channel in self._channels for t in channel.unreported()]


def _check_match(gpu: PagedLayout, host: HostPool) -> None:
    if not isinstance(gpu, PagedLayout) or not isinstance(host, HostPool):
        raise TypeError(
            "a handler takes a PagedLayout and a HostPool, in this order, not "
            f"{type(gpu).__name__} and {type(host).__name__}"
        )
    if gpu.device.type != host.device.type:
        raise ValueError(
            f"the cache is on {gpu.device}, the host pool was made for {host.device}; make the "
            "pool from this layout"
        )
    gpu.check_same_blocks(host.layout)


_kept: list[object] = []  # memory that a copy may still use


def _close(channels: Sequence[Channel], held: object, process: Process) -> None:
    """The handler was dropped, or the process exits. (A fork has no copies of its own.)"""
    if not process.is_current:
        return
    for channel in channels:
        try:
            channel.close()
        except Exception as error:  # such as a graph capture on this thread
            _kept.append((channels, held))
            warnings.warn(
                f"a handler was dropped, not closed, and cannot wait for its jobs: {error}; its "
                "cache and host pool stay in memory",
                RuntimeWarning,
                stacklevel=2,
            )
