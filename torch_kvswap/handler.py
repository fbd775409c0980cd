"""Stores and loads between a paged cache and host pages, as jobs."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final, Literal

import torch

from torch_kvswap._native import abi, loader
from torch_kvswap._native.arguments import INT64_MIN, NotCopyable, read_int, read_timeout
from torch_kvswap._native.errors import DeviceLostError, SourceFailedError, TransferError
from torch_kvswap._native.handler import NativeHandler
from torch_kvswap._native.submit import After, Ids, Request, resolve_waiting
from torch_kvswap.copy_method import copy_method_options
from torch_kvswap.groups import Groups
from torch_kvswap.host_pool.pool import HostPool
from torch_kvswap.layout import PagedLayout
from torch_kvswap.metrics import COPY_METHODS, Metrics, read_metrics
from torch_kvswap.nvtx import Ranges

__all__ = [
    "AFTER_NOTHING",
    "DeviceLostError",
    "Gate",
    "Job",
    "OffloadHandler",
    "Result",
    "SourceFailedError",
    "TransferError",
]

Direction = Literal["store", "load"]
State = Literal["done", "failed", "cancelled"]

AFTER_NOTHING: Final[tuple[()]] = ()

_STATES: dict[int, State] = {
    abi.DONE: "done",
    abi.FAILED: "failed",
    abi.CANCELLED: "cancelled",
}
_release = loader.library().kvswap_job_release  # __del__ may run when modules are gone


_ERRORS: dict[int, type[TransferError]] = {
    abi.OTHER_ERROR: TransferError,
    abi.DEVICE_LOST: DeviceLostError,
    abi.SOURCE_FAILED: SourceFailedError,
}


@dataclass(frozen=True)
class Result:
    """How a job has ended.

    Attributes:
        job_id (int): Job.id.
        direction: "store" or "load".
        state: "done", "failed" or "cancelled". What a job that is not done has written is
            undefined.
        nbytes (int): bytes that it was to copy.
        copy_method (str): "strided" (copy engine, a driver call for a block), "batch" (copy engine,
            one call for all fragments, or one for each where doctor says so), "staged" (kernels
            pack, the copy engine moves whole pages), "kernel" (it reads and writes host pages
            itself) or "host" (memcpy).
        submit_seconds (float): host time in the call that submitted it.
        queue_seconds (float): time until it was given to the driver.
        copy_seconds (float): time on the device without the waits before it. Of a job that was
            joined with others it is that of all of them; 0 when it was never copied.
        error (TransferError | None): why it failed: a DeviceLostError, a SourceFailedError or a
            plain TransferError. Does not take part in comparisons.
        tag: what store() or load() was given. Does not take part in comparisons, and is left out
            when the result is pickled.
    """

    job_id: int
    direction: Direction
    state: State
    nbytes: int
    copy_method: str
    submit_seconds: float
    queue_seconds: float
    copy_seconds: float
    error: TransferError | None = field(compare=False)  # made anew at each call
    tag: Any = field(default=None, compare=False)

    @property
    def ok(self) -> bool:
        return self.state == "done"

    def __repr__(self) -> str:
        names = [one.name for one in fields(self) if one.name != "tag" or self.tag is not None]
        return f"Result({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "tag": None}


def error_of(results: Sequence[Result]) -> TransferError:
    """The error for these jobs, all of which have failed or were cancelled. It is of a kind of its
    own when all of theirs are of that kind."""
    kinds = {type(result.error) for result in results}
    kind = kinds.pop() if len(kinds) == 1 else TransferError
    kind = kind if issubclass(kind, TransferError) else TransferError
    error = kind("; ".join(map(_sentence, results)), results)
    error.__cause__ = results[0].error
    return error


def _sentence(result: Result) -> str:
    name = f"{result.direction} {result.job_id}"
    if result.state == "cancelled":
        return f"{name} was cancelled"
    return f"{name} failed: {result.error}"


def direction_of(channel: int) -> Direction:
    return "store" if channel == abi.STORES else "load"


def result_of(native: abi.JobResult, tag: object = None) -> Result:
    """Of a job that has ended."""
    error = None
    if native.error is not None:
        error = _ERRORS[native.error_kind](native.error.decode())
    return Result(
        job_id=native.id,
        direction=direction_of(native.channel),
        state=_STATES[native.state],
        nbytes=native.nbytes,
        copy_method=COPY_METHODS[native.copy_method],
        submit_seconds=native.submit_seconds,
        queue_seconds=native.queue_seconds,
        copy_seconds=native.copy_seconds,
        error=error,
        tag=tag,
    )


class Gate(NotCopyable):
    """Makes a captured CUDA graph wait on each replay until a load has landed.

    Capture `wait(layer_group)` in front of the kernels that read loaded layers.
    `load(..., gate=gate)` closes all groups in the order of the current stream, on which the graph
    must be replayed afterwards, and opens each group as soon as its layers have landed, failed or
    been cancelled. Without a load the graph does not wait. Any thread may call.

    Graphs may outlive the gate and its handler: eight bytes of pinned memory for each group are
    never freed. The gate has a stream and two events. They are freed after the gate was dropped, as
    soon as the handler makes another gate or is dropped too.

    Attributes:
        layer_groups (int): number of groups of layers.
    """

    _native: int | None = None

    def __init__(self, handler: NativeHandler, layer_groups: int) -> None:
        self._handler = handler
        self.layer_groups = read_int("layer_groups", layer_groups, 1, handler.groups.num_layers)
        if handler.device.type != "cuda":
            raise ValueError(
                f"a gate makes CUDA streams wait, but the cache is on {handler.device}, where a "
                "load has landed when it returns; leave the gate out"
            )
        self._native = handler.make_gate(self.layer_groups)

    def __del__(self) -> None:
        if self._native is not None:
            self._handler.release_gate(self._native)

    def wait(self, layer_group: int = 0, stream: torch.cuda.Stream | None = None) -> None:
        """Makes work given to the stream from now on wait until the group of layers is open.

        In a captured stream, each replay waits there.

        Args:
            layer_group (int): 0 to layer_groups - 1.
            stream (torch.cuda.Stream | None): a stream of any GPU; None is the current stream of
                the cache's GPU. A stream other than the one on which a load closes the gate passes
                as long as the gate is open: order it behind the closing, with an event.

        Raises:
            IndexError: the gate has no such group.
        """
        layer_group = _read_layer_group(layer_group, self.layer_groups, "the gate")
        self._handler.check_process()
        loader.call("kvswap_gate_wait", self._native, layer_group, *resolve_waiting(stream))


class Job(NotCopyable):
    """A store or a load, from its submission on. Any thread may call. Keeps its handler.

    Attributes:
        id (int): number within the handler, in the order of submission.
        direction: "store" or "load".
        nbytes (int): bytes that it copies.
        layer_groups (int): groups in which the layers of a load are moved, 1 if not asked for.
        tag: what store() or load() was given.
    """

    __slots__ = (
        *("__weakref__", "_native", "direction", "handler", "id", "layer_groups", "nbytes", "tag"),
    )

    def __init__(
        self, handler: OffloadHandler, native: int, request: abi.Request, tag: object
    ) -> None:
        self._native = native
        self.handler = handler
        self.id: int = request.id
        self.direction: Direction = direction_of(request.channel)
        self.nbytes: int = request.nbytes
        self.layer_groups: int = request.layer_groups
        self.tag: Any = tag

    def __repr__(self) -> str:
        try:
            state = self.handler._native.job(self._native).state
            name = _STATES.get(state, "queued" if state == abi.QUEUED else "running")
        except RuntimeError:  # a fork has nothing of the handler
            name = "unknown"
        tag = "" if self.tag is None else f", tag={self.tag!r}"
        return f"Job({self.direction} {self.id}, nbytes={self.nbytes}, state={name}{tag})"

    def __del__(self) -> None:
        if hasattr(self, "_native"):  # else __init__ was not reached
            _release(self._native)

    @property
    def result(self) -> Result | None:
        """How it ended; None until query(), synchronize() or poll() has found that it has."""
        answer = self.handler._native.job(self._native)
        return result_of(answer, self.tag) if answer.state in _STATES else None

    def query(self) -> bool:
        """Whether the job has ended, done or not. Does not wait."""
        return self.handler._native.query(self._native)

    def synchronize(self, timeout: float | None = None) -> None:
        """Blocks the host until the job has ended: OffloadHandler.synchronize(self, timeout)."""
        self.handler.synchronize(self, timeout)

    def wait(self, stream: torch.cuda.Stream | None = None, layer_group: int | None = None) -> None:
        """Makes work given to the stream from now on wait for the job; the host goes on.

        A job that is still queued is first given to the driver, with all that is queued ahead of
        it; the host waits for that, but for nothing on the GPU.

        Args:
            stream (torch.cuda.Stream | None): a stream of any GPU; None is the current stream of
                the cache's GPU.
            layer_group (int | None): waits only until the layers of this group, and of those
                before it, have landed. Layer l of n is in group l * layer_groups // n, see
                layer_group_of(). None waits for all.

        Raises:
            IndexError: the job has no such group.
            TransferError: the job has failed or was cancelled. A failure that comes later is
                reported by poll() and synchronize().
            RuntimeError: the stream is capturing a CUDA graph, which could not hold the wait.
                Raised whether or not the job has ended.
        """
        group = -1
        if layer_group is not None:
            group = _read_layer_group(layer_group, self.layer_groups, "the job")
        self.handler._native.wait(self._native, group, *resolve_waiting(stream))
        result = self.result
        if result is not None and not result.ok:
            raise error_of([result])

    def layer_group_of(self, layer: int) -> int:
        """The group of layers that has this layer.

        Args:
            layer (int): position of its tensor in the layout, or in all layouts one after another.

        Raises:
            IndexError: the cache has no such layer.
        """
        layers = self.handler._native.groups.num_layers
        layer = read_int("layer", layer, INT64_MIN)
        if not 0 <= layer < layers:
            raise IndexError(f"layer {layer} of a cache with layers 0 to {layers - 1}")
        return layer * self.layer_groups // layers


def _read_layer_group(layer_group: object, layer_groups: int, owner: str) -> int:
    group = read_int("layer_group", layer_group, INT64_MIN)
    if not 0 <= group < layer_groups:
        raise IndexError(f"layer_group is {group}; {owner} has groups 0 to {layer_groups - 1}")
    return group


class OffloadHandler(NotCopyable):
    """Stores blocks of a paged cache into host pages and loads them back, without blocking.

    A hybrid model has a list of layouts, one for each group of layers, and a pool for each; then
    every argument with ids is a list too, with an entry for each group, empty for groups that have
    no blocks in the job. The handler holds layouts and pools while it lives.

    Stores run in the order of submission, so do loads and expedited loads, and so do two jobs that
    share a block or a page which one of them writes; others overlap. docs/ordering.md has the
    rules.

    Any thread may call any method. A signal handler or a __del__ must not: it can run inside of
    another call and would wait for its lock. A context manager, which closes it. A handler that is
    dropped or left open at exit is closed. In a forked child every call raises RuntimeError. With a
    cache on the CPU the same calls copy before they return.

    Args:
        gpu (PagedLayout | Sequence[PagedLayout]): the cache.
        host (HostPool | Sequence[HostPool]): pages for blocks of the same slabs.
        copy_method (str | None): "auto" takes for each transfer the one that is predicted to end
            first; "strided", "batch", "staged" or "kernel" is always taken. None reads
            KVSWAP_COPY_METHOD, "auto" by default.
        staging_bytes (int): GPU memory for staged copies, half for stores, half for loads, taken at
            once where some transfer could be staged.
        submit_thread (bool): a thread for each channel gives all copies to the driver, 40 to 250 us
            after it was woken up.

    Raises:
        ValueError: gpu and host differ, or an option cannot be had.
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
        self._tags: dict[int, object] = {}  # of jobs that were not polled, by their ids
        self._tags_lock = threading.Lock()
        self._engine: weakref.ref[object] | None = None
        self._engine_lock = threading.Lock()
        options = copy_method_options(copy_method, staging_bytes, groups.device)
        self._native = NativeHandler(groups, submit_thread, options)
        # Holds the cache and pools: neither may go before the jobs have ended.
        weakref.finalize(self, self._native.destroy, weakref.ref(self))
        for pool in groups.pools:
            pool._register_user(self)

    @property
    def layouts(self) -> tuple[PagedLayout, ...]:
        return self._native.groups.layouts

    @property
    def pools(self) -> tuple[HostPool, ...]:
        return self._native.groups.pools

    def store(
        self,
        *,
        gpu_block_ids: Ids | Sequence[Ids],
        page_ids: Ids | Sequence[Ids],
        first_block: int | Sequence[int] = 0,
        after: After = None,
        copy_engines_only: bool = False,
        tag: object = None,
    ) -> Job:
        """Copies GPU block gpu_block_ids[j] to host page page_ids[(first_block + j) // k], slot
        (first_block + j) % k, where k is host.blocks_per_page.

        Until the job has ended, only work on a stream that waits for it (`Job.wait`) may write the
        blocks or touch the pages.

        Args:
            gpu_block_ids, page_ids: 1-D lists, numpy arrays or CPU tensors of integers, copied
                before this returns.
            first_block (int | Sequence[int]): slot of the first block in its page. The last page
                may be used in part, too.
            after: the copy starts behind all work given to this stream so far, or behind this
                event. None is the calling thread's current stream on the cache's device, which has
                the kernels that wrote the blocks. AFTER_NOTHING starts at once.
            copy_engines_only (bool): kernels beside the copy are slowed down no more than by one
                big copy, but their launches may wait, since the driver is busier. The copy may take
                longer.
            tag: any object, for Result.tag. It is held until poll() has reported the job.

        Raises:
            IndexError, TypeError, ValueError: an argument is wrong.
            DeviceLostError: the device is lost.
            RuntimeError: the handler is closed, or the stream is being captured into a CUDA graph.
            MemoryError: there is too little host memory.

        If it raises, there is no job. Any other failure ends the returned job as failed. A store
        fails when a load was to fill one of its blocks and failed or was cancelled, unless poll()
        has reported that load.
        """
        self._native.check_open()
        ids = gpu_block_ids, page_ids, first_block
        groups = self._native.groups
        request = Request(groups, abi.STORES, *ids, after, copy_engines_only=copy_engines_only)
        return self._submit(request, tag)

    def load(
        self,
        *,
        page_ids: Ids | Sequence[Ids],
        gpu_block_ids: Ids | Sequence[Ids],
        first_block: int | Sequence[int] = 0,
        after: After = None,
        layer_groups: int | None = None,
        expedited: bool = False,
        gate: Gate | None = None,
        copy_engines_only: bool = False,
        tag: object = None,
    ) -> Job:
        """store() the other way round. Whoever uses the loaded blocks waits for the job.

        A load fails when a store was to fill one of its pages and failed or was cancelled: such a
        page is invalid until it is stored again.

        Args:
            page_ids, gpu_block_ids, first_block, copy_engines_only, tag: see store().
            after: as of store(); stands for the work that read or wrote the GPU blocks before.
            layer_groups (int | None): the layers are moved in so many groups, one after another,
                and `Job.wait` can wait for one of them.
            expedited (bool): goes ahead of the loads that are queued or running, in a channel of
                its own.
            gate (Gate | None): is closed, in the order of the current stream, until the load has
                landed. It has as many groups of layers as the load. The call returns when the load
                is on the device.

        Raises:
            IndexError, TypeError, ValueError, RuntimeError, MemoryError, DeviceLostError: see
                store().
        """
        self._native.check_open()
        channel = abi.EXPEDITED if expedited else abi.LOADS
        ids = gpu_block_ids, page_ids, first_block
        parts = self._read_layer_groups(layer_groups, gate)
        closed = None if gate is None else gate._native
        groups = self._native.groups
        request = Request(groups, channel, *ids, after, parts, closed, copy_engines_only)
        return self._submit(request, tag)

    def poll(self) -> list[Result]:
        """The jobs that have ended since the last call, in the order in which they ended.

        Each job is in one answer only. Does not wait. Call it now and then: until then the handler
        remembers every job's result, in 120 bytes each, and its tag.

        Raises:
            RuntimeError: an OffloadEngine uses this handler, and has to see the results: call its
                poll().
        """
        if self._get_engine() is not None:
            raise RuntimeError("an OffloadEngine uses this handler; call its poll()")
        return self._take_results()

    def _take_results(self) -> list[Result]:
        """poll(), for the engine too."""
        results = self._native.poll(result_of)
        for result in results:
            self._ranges.end(result.job_id)
        if not results:
            return results
        with self._tags_lock:  # store() and load() hold it until the tag is there
            if not self._tags:
                return results
            tags = [self._tags.pop(result.job_id, None) for result in results]
        return [_tagged(result, tag) for result, tag in zip(results, tags, strict=True)]

    def synchronize(
        self, jobs: Job | Iterable[Job] | None = None, timeout: float | None = None
    ) -> None:
        """Blocks the host until the jobs have ended; poll() still reports them.

        Signals are handled meanwhile.

        Args:
            jobs: None is every job that poll() has not reported.
            timeout (float | None): seconds; None is for ever.

        Raises:
            TransferError: some of them failed or were cancelled; it has their results.
            TimeoutError: some still run after the timeout.
            ValueError: a job is of another handler.
        """
        own = None if jobs is None else [self._own(job) for job in _several(jobs)]
        timeout = read_timeout("timeout", timeout)
        succeeded = self._native.synchronize(
            None if own is None else [job._native for job in own], timeout
        )
        if succeeded is None:
            raise TimeoutError(f"after {timeout:g} s {self._describe_running(own)}")
        if succeeded:
            return
        if own is None:
            results = self._native.unreported_failures(result_of)
            with self._tags_lock:
                failed = [_tagged(result, self._tags.get(result.job_id)) for result in results]
        else:
            ended = [job.result for job in own]
            failed = [result for result in ended if result and not result.ok]
        if failed:  # else another thread has been told
            raise error_of(failed)

    def cancel(self, job: Job) -> bool:
        """Whether the job is, or will be, reported as cancelled; False when it has ended before.

        A job that is queued ends at once and copies nothing. One that the driver has runs to its
        end; what it wrote is undefined. Pages that a cancelled store was to fill are invalid.

        Raises:
            TypeError: it is no Job.
        """
        return self._native.cancel(self._own(job)._native)

    def gate(self, layer_groups: int = 1) -> Gate:
        """A gate, open, with so many groups of layers: 1 to the number of tensors of the cache."""
        return Gate(self._native, layer_groups)

    def metrics(self) -> Metrics:
        """What the handler has done and has to do, now."""
        return read_metrics(self._native.fill_metrics)

    def rebind(self, gpu: PagedLayout | Sequence[PagedLayout]) -> None:
        """Waits for all jobs, and goes on with a cache that has moved.

        If it raises, the old cache stays.

        Args:
            gpu: new layouts, with blocks of the same sizes.

        Raises:
            ValueError: the sizes differ.
            RuntimeError: another thread submits meanwhile, or the driver refuses what the new cache
                needs.
        """
        self._native.synchronize(None, None)
        self._native.rebind(self._native.groups.moved_to(gpu))

    def close(self) -> None:
        """Takes no more jobs, waits for those it has, frees threads, streams and events.

        poll() still reports what it has not reported yet. Idempotent; returns at once when the
        device is lost. Ctrl-C interrupts the wait: no more jobs are taken then, and another close()
        goes on.
        """
        self._native.close()

    def __enter__(self) -> OffloadHandler:
        self._native.check_open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _assign_pages_to(self, engine: object) -> None:
        """Gives all pages to the engine, until it is dropped. Raises ValueError when another one
        has them, RuntimeError when the handler is closed."""
        self._native.check_open()
        with self._engine_lock:
            if self._get_engine() is not None:
                raise ValueError(
                    "the handler has an engine already, which assigns its pages; make a handler "
                    "and a pool for another one"
                )
            self._engine = weakref.ref(engine)

    def _get_engine(self) -> object | None:
        return None if self._engine is None else self._engine()

    def _submit(self, request: Request, tag: object) -> Job:
        if not self._ranges.enabled:
            return self._submit_tagged(request, tag)
        with self._ranges.submit(direction_of(request.native.channel)):
            job = self._submit_tagged(request, tag)
            self._ranges.begin(job.id, job.direction, job.nbytes)
        return job

    def _submit_tagged(self, request: Request, tag: object) -> Job:
        if tag is None:
            return Job(self, self._native.submit(request), request.native, tag)
        with self._tags_lock:  # poll() may see the job before this thread goes on
            job = Job(self, self._native.submit(request), request.native, tag)
            self._tags[job.id] = tag
        return job

    def _read_layer_groups(self, layer_groups: int | None, gate: Gate | None) -> int:
        """In how many groups of layers a load is moved."""
        if gate is not None and not isinstance(gate, Gate):
            raise TypeError(
                f"gate is a {type(gate).__name__}; pass what OffloadHandler.gate() returns"
            )
        if gate is not None and gate._handler is not self._native:
            raise ValueError("the gate was made by another handler than this load's")
        if layer_groups is None:
            return 1 if gate is None else gate.layer_groups
        groups = read_int("layer_groups", layer_groups, 1, self._native.groups.num_layers)
        if gate is not None and gate.layer_groups != groups:
            raise ValueError(
                f"the gate has {gate.layer_groups} layer groups, the load {groups}; make them equal"
            )
        return groups

    def _describe_running(self, jobs: Sequence[Job] | None) -> str:
        """What synchronize() says of these jobs, None for all, that have not ended in time."""
        if jobs is None:
            metrics = self.metrics()
            channels = (metrics.stores, metrics.loads, metrics.expedited)
            count = sum(channel.queued + channel.running for channel in channels)
            return f"{_count_jobs(count)} not ended"
        running = [job for job in jobs if not job.query()]
        if not running:  # they have ended since then
            return f"{_count_jobs(len(jobs))} not all ended"
        first = f"{running[0].direction} {running[0].id}"
        return f"{len(running)} of {_count_jobs(len(jobs))} not ended; the first is {first}"

    def _own(self, job: object) -> Job:
        if not isinstance(job, Job):
            raise TypeError(f"store() and load() return Jobs, not {job!r}")
        if job.handler is not self:
            raise ValueError(f"{job.direction} {job.id} is of another handler")
        return job


def _several(jobs: Job | Iterable[Job]) -> Iterable[Job]:
    if isinstance(jobs, int | float):
        raise TypeError(f"jobs is {jobs}; pass Jobs, or timeout={jobs}")
    return jobs if isinstance(jobs, Iterable) else [jobs]


def _count_jobs(count: int) -> str:
    return "1 job has" if count == 1 else f"{count} jobs have"


def _tagged(result: Result, tag: object) -> Result:
    return result if tag is None else replace(result, tag=tag)
