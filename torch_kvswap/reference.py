"""The handler in its plain form: what an OffloadHandler does, composed of the ops.

A transfer is three steps. The ids of pages become ids of their slots, ids become addresses, and one
op copies the bytes between them::

    slots = expand_block_ids(page_ids, blocks_per_page, first_slot, len(gpu_block_ids))
    src, dst = addresses_of(gpu, gpu_block_ids), addresses_of(host, slots)
    swap_blocks_batch(src, dst, sizes)

The rest is about time. All copies run on one stream, so each follows the one before it. Events
order them with the caller's kernels, and the host waits for none of it::

    compute stream | kernels that use the blocks |ready| goes on at once ... |waits in Job.wait()
                                                   |                         |
    copy stream    | the copies before this one    v |start| the copy |end|--+

On a device that only PyTorch drives, no op takes addresses: PyTorch's operations gather the blocks
into a buffer on the device, and copy its rows to the pages (devices/blocks.py).
"""

from __future__ import annotations

import itertools
import math
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torch_kvswap._native.arguments import NotCopyable, count_of, kind_of, read_int
from torch_kvswap._native.ids import Ids, read_ids
from torch_kvswap._native.keep_alive import allow_free, keep_alive
from torch_kvswap.devices.blocks import GroupTensors, send_ids
from torch_kvswap.devices.kind import is_native
from torch_kvswap.host_pool.pool import HostPool
from torch_kvswap.layout import PagedLayout, Slabs
from torch_kvswap.ops import expand_block_ids, swap_blocks_batch
from torch_kvswap.results import DeviceLostError, Direction, Result, TransferError, error_of


class ReferenceHandler(NotCopyable):
    """Stores blocks of a paged cache into host pages and loads them back, asynchronously.

    Has store(), load(), poll(), synchronize() and close() of an OffloadHandler, without timeouts,
    for one group of raw pages, on any device for which PyTorch has streams and events. Unlike
    there, a failed store does not fail the loads of its pages, and poll() reports in order of
    submission. Do not capture a CUDA graph while jobs are in flight.

    Ordering: a transfer starts after all work on the compute stream, which is the calling thread's
    current stream on the cache's device, and after the transfer before it. Nothing may use its
    blocks and pages until it has ended, except work on a stream that waits for it (`Job.wait`).

    Threads: any thread may call any method.

    Lifetime: holds the cache and the pool. A context manager that closes the handler on exit. A
    handler that is dropped, or open when the process exits, is closed. Closing the pool closes it.

    Args:
        gpu (PagedLayout): the cache.
        host (HostPool): the host pages, made for such blocks.

    Raises:
        TypeError: gpu is not a PagedLayout, or host is not a HostPool.
        ValueError: gpu and host do not match, the pages are encoded or have checksums, or PyTorch
            has no streams or events for the device.
        RuntimeError: the pool is closed.
    """

    def __init__(self, gpu: PagedLayout, host: HostPool) -> None:
        for name, given, kind in (("gpu", gpu, PagedLayout), ("host", host, HostPool)):
            if not isinstance(given, kind):
                raise TypeError(f"{name} is {kind_of(given)}; pass one {kind.__name__}")
        self.gpu, self.host, self.device = gpu, host, gpu.device
        if host.encoding != "raw":
            raise ValueError(f"the pages are {host.encoding}; make the pool with encoding='raw'")
        if host.verify != "off":
            raise ValueError(
                f"the pool has verify={host.verify!r}, and no op makes checksums; make it with "
                "verify='off'"
            )
        host._check_blocks(gpu, "make the pool from this layout")
        try:
            self._stream = self._new_stream()
            self._new_event().record(self._stream)
        except RuntimeError as error:
            raise ValueError(
                f"a cache on {self.device} is not supported: torch has no streams or events for it "
                f"({error})"
            ) from error
        self._copy_method = "host" if self.device.type == "cpu" else "batch"  # in results
        self._tensors: GroupTensors | None = None  # where no op takes addresses
        if not is_native(self.device.type):
            self._copy_method = "generic"
            self._tensors = GroupTensors(
                gpu.tensors, gpu.block_dim, host._slots(), host._is_pinned_by_torch
            )
        self._jobs: deque[Job] = deque()  # poll() has not reported these
        self._numbers = itertools.count()
        self._flights = _Flights(gpu, host)
        host._check_new_user(assigns_pages=False)
        host._register_user(self._flights)
        keep_alive(self._flights)
        weakref.finalize(self, self._flights.close)

    def store(
        self, *, gpu_block_ids: Ids, page_ids: Ids, first_slot: int = 0, tag: object = None
    ) -> Job:
        """Copies blocks of the cache to host pages. See OffloadHandler.store().

        GPU block `gpu_block_ids[j]` goes to page `page_ids[(first_slot + j) // k]`, slot
        `(first_slot + j) % k`, where k is `HostPool.blocks_per_page`. The first and the last page
        may be partly filled.
        """
        return self._submit("store", gpu_block_ids, page_ids, first_slot, tag)

    def load(
        self, *, page_ids: Ids, gpu_block_ids: Ids, first_slot: int = 0, tag: object = None
    ) -> Job:
        """Copies host pages to blocks of the cache: store() in the other direction."""
        return self._submit("load", gpu_block_ids, page_ids, first_slot, tag)

    def poll(self) -> list[Result]:
        """Returns the jobs that have ended since the last call, in order of submission."""
        results: list[Result] = []
        with self._flights.lock:
            while self._jobs and (result := self._jobs[0]._look()):
                results.append(result)
                self._jobs.popleft()
        return results

    def synchronize(self, jobs: Job | Iterable[Job] | None = None) -> None:
        """Blocks the host until jobs have ended. poll() still reports them.

        Args:
            jobs (Job | Iterable[Job] | None): None is every job that poll() has not reported.

        Raises:
            TypeError: jobs contains something that is not a Job of a ReferenceHandler.
            ValueError: a job belongs to another handler.
            TransferError: some of the jobs failed; its `results` are theirs.
        """
        if jobs is None:
            waited = tuple(self._jobs)
        else:
            waited = tuple(jobs) if isinstance(jobs, Iterable) else (jobs,)
        for index, job in enumerate(waited):
            if not isinstance(job, Job):
                raise TypeError(
                    f"jobs[{index}] is {kind_of(job)}; pass the Job that store() or load() returned"
                )
            if job.handler is not self:
                raise ValueError(
                    f"jobs[{index}] is {job.direction} {job.id} of another handler; pass it to "
                    "that handler"
                )
        for job in waited:
            with suppress(RuntimeError):  # the result says that the device is lost
                job._end.synchronize()
        if failed := [result for job in waited if (result := job._look()) and not result.ok]:
            raise error_of(failed)

    def close(self) -> None:
        """Refuses new jobs and waits for all jobs, which poll() still reports. Idempotent."""
        self._flights.close()

    def __enter__(self) -> ReferenceHandler:
        self._flights.check_open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _new_stream(self) -> Any:
        return nullcontext() if self.device.type == "cpu" else torch.Stream(self.device)

    def _current_stream(self) -> Any:
        return None if self.device.type == "cpu" else torch.accelerator.current_stream(self.device)

    def _new_event(self) -> Any:
        is_cpu = self.device.type == "cpu"
        return _CpuEvent() if is_cpu else torch.Event(self.device, enable_timing=True)

    def _submit(
        self, direction: Direction, gpu_block_ids: Ids, page_ids: Ids, first_slot: int, tag: object
    ) -> Job:
        called = time.perf_counter()
        with self._flights.lock:
            self._flights.check_open()
            self.gpu._check_unmoved()
            blocks, slots = self._read(direction, gpu_block_ids, page_ids, first_slot)
            ready, start, end = (self._new_event() for _ in range(3))
            nbytes = len(blocks) * self.gpu.block_bytes
            job = Job(self, next(self._numbers), direction, nbytes, tag, start, end)
            ready.record(self._current_stream())
            ready.wait(self._stream)
            self._flights.running.add(end)
            try:
                with self._stream:
                    start.record(self._stream)
                    self._copy(direction, blocks, slots)
                    end.record(self._stream)
                job._submit_seconds = time.perf_counter() - called
                self._jobs.append(job)
            except BaseException as error:  # KeyboardInterrupt too
                end.record(self._stream)  # behind what the driver may have begun to copy
                if not isinstance(error, RuntimeError):
                    end.synchronize()
                    self._flights.running.discard(end)
                    raise
                job._error = TransferError(str(error))
                self._jobs.append(job)
            return job

    def _read(
        self, direction: Direction, gpu_block_ids: Ids, page_ids: Ids, first_slot: int
    ) -> tuple[Tensor, Tensor]:
        """Checks the ids of a transfer. Returns the block and the slot of each copy, int64 [n]."""
        ready, per_page = self.host._ready_range, self.host.blocks_per_page
        blocks = _read_ids("gpu_block_ids", gpu_block_ids, range(self.gpu.num_blocks))
        pages = _read_ids("page_ids", page_ids, range(ready.end_page))
        first = read_int("first_slot", first_slot, 0, per_page - 1)
        needed = math.ceil((first + len(blocks)) / per_page) if len(blocks) else 0
        if len(pages) != needed:
            raise ValueError(
                f"page_ids has {count_of(len(pages), 'page')} of {count_of(per_page, 'block')}; "
                f"for {count_of(len(blocks), 'block')} from first_slot={first} on, pass {needed}"
            )
        name, written = ("page_ids", pages) if direction == "store" else ("gpu_block_ids", blocks)
        first_at: dict[int, int] = {}
        for at, number in enumerate(written.tolist()):
            if (before := first_at.setdefault(number, at)) != at:
                raise ValueError(
                    f"{name}[{before}] and {name}[{at}] are both {number}: it would be written "
                    "twice; pass each destination once"
                )
        return blocks, expand_block_ids(pages, per_page, first if needed else 0, len(blocks))

    def _copy(self, direction: Direction, blocks: Tensor, slots: Tensor) -> None:
        """Copies on the current stream."""
        if self._tensors is None:
            on_gpu = _addresses_of(self.gpu, blocks)
            on_host = _addresses_of(self.host._slabs, slots)
            src, dst = (on_gpu, on_host) if direction == "store" else (on_host, on_gpu)
            swap_blocks_batch(src, dst, torch.from_numpy(self.gpu.sizes).repeat(len(blocks)))
            return
        slots, order = slots.sort()  # adjacent slots are one copy
        copy = self._tensors.store if direction == "store" else self._tensors.load
        copy(slots.numpy(), send_ids(blocks[order], self.device))


@dataclass(eq=False)
class Job:
    """A submitted store or load. Any thread may call any method.

    Attributes:
        handler (ReferenceHandler): the handler that runs the job; the job keeps it alive.
        id (int): number of the job within its handler, in order of submission.
        direction (str): "store" or "load".
        nbytes (int): size of the transfer in bytes.
        tag: the object passed to store() or load().
        result (Result | None): the outcome, once query(), synchronize() or poll() has seen the end.
    """

    handler: ReferenceHandler
    id: int
    direction: Direction
    nbytes: int
    tag: Any
    _start: Any  # events around the copy, on the copy stream
    _end: Any
    result: Result | None = None
    _error: TransferError | None = None
    _submit_seconds: float = 0.0

    def query(self) -> bool:
        """Returns whether the job has ended, without waiting."""
        return self._look() is not None

    def synchronize(self) -> None:
        """Blocks the host until the job has ended. See ReferenceHandler.synchronize()."""
        self.handler.synchronize(self)

    def wait(self, stream: torch.Stream | None = None) -> None:
        """Makes work submitted to the stream after this call wait for the job.

        A failed job raises nothing here: poll() reports it.

        Args:
            stream (torch.Stream | None): a stream of any device of this type. None is the current
                stream of the cache's device.
        """
        if self._look() is None:
            self._end.wait(stream or self.handler._current_stream())

    def _look(self) -> Result | None:
        """Asks whether the copy has ended, and returns the result if it has."""
        with self.handler._flights.lock:
            if self.result is None:
                try:
                    if not self._end.query():
                        return None
                except RuntimeError as error:
                    self._error = DeviceLostError(f"the device is lost: {error}")
                self.handler._flights.running.discard(self._end)
                self.result = self._make_result()
            return self.result

    def _make_result(self) -> Result:
        seconds = 0.0
        if self._error is None:
            try:
                seconds = self._start.elapsed_time(self._end) / 1e3
            except RuntimeError:  # not every device measures the time between events
                seconds = math.nan
        return Result(
            job_id=self.id,
            direction=self.direction,
            state="failed" if self._error else "done",
            nbytes=self.nbytes,
            link_bytes=self.nbytes,
            copy_method=self.handler._copy_method,
            submit_seconds=self._submit_seconds,
            queue_seconds=0.0,
            copy_seconds=seconds,
            rejected=(),
            error=self._error,
            tag=self.tag,
        )


class _CpuEvent(torch.cpu.Event):
    """A timed event of the CPU. It happens at once, as a copy has ended when its call returns."""

    def __init__(self) -> None:
        self._seconds = 0.0

    def record(self, stream: object = None) -> None:
        self._seconds = time.perf_counter()

    def elapsed_time(self, end: _CpuEvent) -> float:
        return (end._seconds - self._seconds) * 1e3


class _Flights:
    """The copies in flight, and the memory that they use.

    It outlives its handler: it stays alive until close() has seen all copies end, or for ever.
    """

    def __init__(self, gpu: PagedLayout, host: HostPool) -> None:
        self.memory = gpu, host
        self.lock = threading.RLock()  # guards what the handler and its jobs change
        self.running: set[Any] = set()  # the event behind each copy
        self.is_closed = False

    def check_open(self) -> None:
        """Raises RuntimeError if the handler or its pool is closed, or in a forked child."""
        if self.is_closed:
            raise RuntimeError("the handler is closed; make a new one")
        self.memory[1]._memory.check_open()

    def close(self) -> None:
        with self.lock:
            self.is_closed = True
        for end in tuple(self.running):
            with suppress(RuntimeError):  # a lost device copies nothing any more
                end.synchronize()
        allow_free(self)


def _read_ids(name: str, ids: Ids, valid: range) -> Tensor:
    """Copies ids to an int64 tensor, and refuses those that are not in the range."""
    numbers = np.array(read_ids(name, ids))
    for at in np.flatnonzero((numbers < valid.start) | (numbers >= valid.stop))[:1]:
        raise IndexError(
            f"{name}[{at}] is {numbers[at]}; it must be {valid.start} to {valid.stop - 1}"
        )
    return torch.from_numpy(numbers)


def _addresses_of(slabs: Slabs, blocks: Tensor) -> Tensor:
    """int64 [blocks * slabs], where each block begins in each slab."""
    bases, strides = torch.from_numpy(slabs.bases), torch.from_numpy(slabs.strides)
    return (bases + blocks[:, None] * strides).flatten()
