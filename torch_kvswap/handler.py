"""What a server holds: stores and loads between a paged cache and host pages, as jobs."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from torch_kvswap._native import abi, loader
from torch_kvswap._native.arguments import INT64_MIN, NotCopyable, read_int, read_timeout
from torch_kvswap._native.handler import NativeHandler
from torch_kvswap._native.submit import After, Ids, Request, resolve_waiting
from torch_kvswap.copy_method import copy_method_options
from torch_kvswap.groups import Groups
from torch_kvswap.host_pool.pool import HostPool
from torch_kvswap.layout import PagedLayout
from torch_kvswap.metrics import COPY_METHODS, Metrics, read_metrics
from torch_kvswap.nvtx import Ranges

Direction = Literal["store", "load"]
State = Literal["done", "failed", "cancelled"]

_STATES: dict[int, State] = {
    abi.DONE: "done",
    abi.FAILED: "failed",
    abi.CANCELLED: "cancelled",
}


@dataclass(frozen=True)
class Result:
    """How a job has ended.

    state: "done", "failed" or "cancelled"; what a job wrote that is not done is undefined. nbytes:
    what it was to copy. copy_method: "strided" (copy engine, a driver call for a
    block), "batch" (copy engine, one call for all fragments, or one for each where doctor says so),
    "staged" (kernels pack, the copy engine moves whole pages), "kernel" (it reads and writes host
    pages itself) or "host" (memcpy). submit_seconds: host time in the call that submitted it.
    queue_seconds: how long it waited for its turn to be given to the driver. copy_seconds: the copy
    on the device without the waits before it, for a job that was joined with others that of all of
    them; 0 when it was never copied. error: why it failed; else None.
    """

    job_id: int
    direction: Direction
    state: State
    nbytes: int
    copy_method: str
    submit_seconds: float
    queue_seconds: float
    copy_seconds: float
    error: BaseException | None = field(compare=False)  # made anew for whoever asks

    @property
    def ok(self) -> bool:
        return self.state == "done"


class TransferError(RuntimeError):
    """Jobs that were asked for have failed or were cancelled. results: theirs. Can be pickled."""

    def __init__(self, results: Sequence[Result]) -> None:
        self.results = list(results)
        super().__init__("; ".join(map(_sentence, self.results)))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.results,), self.__dict__  # an exception's own has the text alone


def _sentence(result: Result) -> str:
    name = f"{result.direction} {result.job_id}"
    if result.state == "cancelled":
        return f"{name} was cancelled"
    return f"{name} failed: {result.error}"


def direction_of(channel: int) -> Direction:
    return "store" if channel == abi.STORES else "load"


def result_of(native: abi.JobResult) -> Result:
    """Of a job that has ended."""
    return Result(
        job_id=native.id,
        direction=direction_of(native.channel),
        state=_STATES[native.state],
        nbytes=native.nbytes,
        copy_method=COPY_METHODS[native.copy_method],
        submit_seconds=native.submit_seconds,
        queue_seconds=native.queue_seconds,
        copy_seconds=native.copy_seconds,
        error=None if native.error is None else RuntimeError(native.error.decode()),
    )


class Gate(NotCopyable):
    """What a captured graph waits for on each replay: open, or closed until a load has landed.

    Capture `wait(layer_group)` in front of the kernels that read loaded layers.
    `load(..., gate=gate)` closes all groups in the order of the current stream, on which the graph
    must be replayed afterwards, and opens each group as soon as its layers have landed, failed or
    been cancelled. Without a load the graph does not wait. Any thread may call.
    layer_groups: their number.

    Graphs may outlive the gate and its handler: eight bytes of pinned memory for each group are
    never freed. The gate has a stream and two events. When it has been dropped they are let go as
    soon as the handler makes another gate, or is dropped, too.
    """

    native: int | None = None

    def __init__(self, handler: NativeHandler, layer_groups: int) -> None:
        self.handler = handler
        self.layer_groups = read_int("layer_groups", layer_groups, 1, handler.groups.num_layers)
        if handler.device.type != "cuda":
            raise ValueError(
                f"a gate makes CUDA streams wait, but the cache is on {handler.device}, where a "
                "load has landed when it returns; leave the gate out"
            )
        self.native = handler.make_gate(self.layer_groups)

    def __del__(self) -> None:
        if self.native is not None:
            self.handler.release_gate(self.native)

    def wait(self, layer_group: int = 0, stream: torch.cuda.Stream | None = None) -> None:
        """Makes work given to the stream from now on wait until the layer_group is open.

        In a captured stream, each replay waits there.

        Args:
            layer_group (int): the group of layers.
            stream (torch.cuda.Stream | None): a stream of any GPU; None is the current stream of
                the cache's GPU. A stream other than the one on which a load closes the gate passes
                as long as the gate is open: order it behind the closing, with an event.

        Raises:
            IndexError: the gate has no such layer_group.
        """
        layer_group = read_int("layer_group", layer_group, INT64_MIN)
        if not 0 <= layer_group < self.layer_groups:
            raise IndexError(
                f"layer_group is {layer_group}; the gate has groups 0 to {self.layer_groups - 1}"
            )
        self.handler.check_process()
        loader.call("kvswap_gate_wait", self.native, layer_group, *resolve_waiting(stream))


_release = loader.library().kvswap_job_release  # __del__ may run when modules are gone


class Job(NotCopyable):
    """A store or a load, from its submission on. Any thread may call it. Keeps its handler.

    id: its number within the handler.
    """

    __slots__ = ("__weakref__", "handler", "id", "native")

    def __init__(self, handler: OffloadHandler, native: int, number: int) -> None:
        self.handler = handler
        self.id = number
        self.native = native

    def __del__(self) -> None:
        if hasattr(self, "native"):  # else __init__ was not reached
            _release(self.native)

    @property
    def direction(self) -> Direction:
        """ "store" or "load"."""
        return direction_of(self._ask().channel)

    @property
    def nbytes(self) -> int:
        """What it copies."""
        return int(self._ask().nbytes)

    @property
    def result(self) -> Result | None:
        """How it ended; None while it runs, and until done(), wait() or finished() has looked."""
        answer = self._ask()
        return result_of(answer) if answer.state in _STATES else None

    def done(self) -> bool:
        """Whether it has ended, well or not. Waits for nothing."""
        return bool(self.handler.native.is_done(self.native))

    def wait_on(self, stream: torch.cuda.Stream | None = None) -> None:
        """Makes work given to the stream from now on wait for the job; the host goes on.

        A job that is still queued is first given to the driver, with all that is queued ahead of
        it; the host waits for that, but for nothing on the GPU.

        Args:
            stream (torch.cuda.Stream | None): a stream of any GPU; None is the current stream of
                the cache's GPU.

        Raises:
            TransferError: the job has failed or was cancelled. What fails later, finished() and
                wait() tell.
            RuntimeError: the stream is capturing a CUDA graph, which could not hold the wait.
                Raised whether or not the job has ended.
        """
        self._wait_on(-1, stream)

    def wait_layer(self, layer: int, stream: torch.cuda.Stream | None = None) -> None:
        """wait_on() for the group of layers that has this layer, and those before it.

        layer: the position of its tensor in the layout, or in all layouts one after the other.
        Raises IndexError for a layer that there is not.
        """
        layers = self.handler.native.groups.num_layers
        layer = read_int("layer", layer, INT64_MIN)
        if not 0 <= layer < layers:
            raise IndexError(f"layer {layer} of a cache with layers 0 to {layers - 1}")
        self._wait_on(layer * self._ask().layer_groups // layers, stream)

    def _wait_on(self, layer_group: int, stream: torch.cuda.Stream | None) -> None:
        self.handler.native.wait_on(self.native, layer_group, *resolve_waiting(stream))
        result = self.result
        if result is not None and not result.ok:
            raise TransferError([result]) from result.error

    def _ask(self) -> abi.JobResult:
        return self.handler.native.job(self.native)


def wait_for(native: NativeHandler, jobs: list[Job] | None, timeout: float | None) -> None:
    """`OffloadHandler.wait` for jobs of that handler; None is for all that were not reported."""
    succeeded = native.wait(None if jobs is None else [job.native for job in jobs], timeout)
    if succeeded is None:
        running = [job for job in jobs or () if not job.done()]
        names = ": " + ", ".join(f"{job.direction} {job.id}" for job in running)
        raise TimeoutError(f"after {timeout:g} s some jobs still run{names if running else ''}")
    if succeeded:
        return
    if jobs is None:
        failed = native.unreported_failures(result_of)
    else:
        results = [job.result for job in jobs]
        failed = [result for result in results if result and not result.ok]
    if failed:  # else another thread has been told
        raise TransferError(failed) from failed[0].error


__all__ = ["Job", "OffloadHandler", "Result", "TransferError"]


class OffloadHandler(NotCopyable):
    """Stores blocks of a paged cache into host pages and loads them back, without blocking.

    gpu: the cache. host: pages for the same slabs. A hybrid model has a list of layouts, one for
    each group of layers, and a pool for each; then every argument with ids is a list too, with an
    entry for each group, empty for those that have no blocks in the job. The handler holds all of
    it while it lives. Stores run in the order of submission, loads too, expedited loads too, and so
    do two jobs that share a block or a page which one of them writes; others overlap.

    copy_method: "auto" takes for each transfer the one that is predicted to end first; "strided",
    "batch", "staged" or "kernel" is always taken. None reads KVSWAP_COPY_METHOD, "auto" by default.
    staging_bytes: GPU memory for staged copies, half for stores, half for loads, taken at once
    where some transfer could be staged. submit_thread: a
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
        copy_method: str | None = None,
        staging_bytes: int = 32 << 20,
        submit_thread: bool = False,
    ) -> None:
        groups = Groups(gpu, host)
        self._ranges = Ranges()
        paths = copy_method_options(copy_method, staging_bytes, groups.device)
        self.native = NativeHandler(groups, submit_thread, paths)
        # Holds the cache and pools: neither may go before the jobs have ended.
        weakref.finalize(self, self.native.destroy, weakref.ref(self))
        for pool in groups.pools:
            pool._register_user(self)

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
        copy_engines_only: bool = False,
    ) -> Job:
        """Copies GPU block gpu_block_ids[j] to host page page_ids[(first_block + j) // k], slot
        (first_block + j) % k, where k is host.blocks_per_page; the last page may be part used.

        Ids: 1-D lists, numpy arrays or CPU tensors of integers, copied before this returns.
        after: the copy starts behind all that was given so far to this stream, or behind this
        event; None is the calling thread's current stream on the cache's device (the kernels that
        wrote the blocks), () is nothing. Until the job has ended nobody may write the blocks or
        touch the pages, but for work on a stream that waits for it (`Job.wait_on`).
        copy_engines_only:
        only copy engines copy, so that kernels beside are slowed down no more than by one big copy,
        but their launches may wait, since the driver is busier; the copy may take longer.

        Wrong arguments raise (IndexError, TypeError, ValueError), as do a closed handler, a lost
        device and a stream that is being captured into a CUDA graph (RuntimeError), and too little
        host memory (MemoryError): then there is no job. Any other failure ends the job that is
        returned as failed. A store fails when a load was to fill one of its blocks and failed or
        was cancelled, unless finished() has said so.
        """
        ids = gpu_block_ids, page_ids, first_block
        groups = self.native.groups
        request = Request(groups, abi.STORES, *ids, after, copy_engines_only=copy_engines_only)
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
        copy_engines_only: bool = False,
    ) -> Job:
        """store() the other way round, from page_ids to gpu_block_ids. What `after` says is what
        read or wrote the GPU blocks before. Whoever uses the loaded blocks waits for the job.

        A load fails when a store was to fill one of its pages and failed or was cancelled: such a
        page is invalid until it is stored again.

        layer_groups: the layers are moved group after group, and `Job.wait_layer` waits for one of
        them. expedited: goes ahead of the loads that are queued or running, in a channel of its
        own. gate: is closed, in the order of the current stream, until the load has landed; it has
        as many layer_groups as there are layer groups. Returns when the load is on the device.
        """
        channel = abi.EXPEDITED if expedited else abi.LOADS
        ids = gpu_block_ids, page_ids, first_block
        layer_groups = self._layer_parts(layer_groups, gate)
        closed = None if gate is None else gate.native
        request = Request(
            self.native.groups, channel, *ids, after, layer_groups, closed, copy_engines_only
        )
        return self._submit(request)

    def finished(self) -> list[Result]:
        """The jobs that have ended since the last call, each job in one call only, in the order in
        which they ended. Waits for nothing. Call it now and then: until then the handler remembers
        every job's result, in 120 bytes each."""
        for result in (results := self.native.finished(result_of)):
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
        return self.native.cancel(self._own(job).native)

    def gate(self, layer_groups: int = 1) -> Gate:
        """A gate, open, with this many layer_groups: 1 to the number of tensors of the cache."""
        return Gate(self.native, layer_groups)

    def metrics(self) -> Metrics:
        """What the handler has done and has to do, now."""
        return read_metrics(self.native.fill_metrics)

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

    def _layer_parts(self, layer_groups: int | None, gate: Gate | None) -> int:
        """In how many groups of layers a load is moved."""
        if gate is not None and not isinstance(gate, Gate):
            raise TypeError(
                f"gate is a {type(gate).__name__}; pass what OffloadHandler.gate() returns"
            )
        if gate is not None and gate.handler is not self.native:
            raise ValueError("the gate was made by another handler than this load's")
        if layer_groups is None:
            return 1 if gate is None else gate.layer_groups
        layer_groups = read_int("layer_groups", layer_groups, 1, self.native.groups.num_layers)
        if gate is not None and gate.layer_groups != layer_groups:
            raise ValueError(
                f"the gate has {gate.layer_groups} layer groups, the load {layer_groups}; "
                "make them equal"
            )
        return layer_groups

    def _own(self, job: object) -> Job:
        if not isinstance(job, Job):
            raise TypeError(f"store() and load() return Jobs, not {job!r}")
        if job.handler is not self:
            raise ValueError(f"{job.direction} {job.id} is of another handler")
        return job


def _several(jobs: Job | Iterable[Job]) -> Iterable[Job]:
    return jobs if isinstance(jobs, Iterable) else [jobs]
