"""Transfers between a paged KV cache and host pages, as jobs."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import torch

from torch_kvswap._native.arguments import (
    INT64_MIN,
    NotCopyable,
    count_of,
    kind_of,
    read_int,
    read_switch,
    read_timeout,
)
from torch_kvswap._native.ids import Ids
from torch_kvswap._native.keep_alive import keep_alive
from torch_kvswap._native.loader import native
from torch_kvswap._native.log import log
from torch_kvswap.copy_method import AUTO, DEFAULT_STAGING_BYTES, copy_method_options
from torch_kvswap.host_pool.pool import HostPool
from torch_kvswap.layout import PagedLayout
from torch_kvswap.offload.exchange import join_ranks, read_exchange
from torch_kvswap.offload.groups import Groups
from torch_kvswap.offload.metrics import Metrics, read_metrics
from torch_kvswap.offload.native import NativeHandler
from torch_kvswap.offload.relays import usable_relays
from torch_kvswap.offload.streams import After, resolve_after
from torch_kvswap.results import (
    CorruptedPageError,
    DeviceLostError,
    Direction,
    Result,
    error_of,
)

STORES, LOADS, EXPEDITED = range(3)  # channels

# Python's message, without an `*unnamed`, does not say which names are missing.
_UNNAMED = "name all arguments of store() and load(): gpu_block_ids=..., page_ids=..."

# A larger share of rejected blocks than this is warned of, from this many encoded blocks on.
_COMMON_REJECTS, _WARN_AFTER_BLOCKS = 0.01, 1000


class Job(NotCopyable, native.Job):
    """A submitted store or load.

    Returned by OffloadHandler.store() and load(). Any thread may call any method. A job keeps its
    handler alive.

    Attributes:
        id (int): number of the job within its handler, in order of submission.
        direction (str): "store" or "load".
        nbytes (int): size of the transfer in bytes.
        layer_groups (int): number of groups in which the layers of a load are moved; 1 by default.
        handler (OffloadHandler): the handler that runs the job.
        tag: the object passed to store() or load().
    """

    __slots__ = ()

    handler: OffloadHandler
    direction: Direction
    tag: Any

    def __repr__(self) -> str:
        try:
            state = self.handler._native.state(self)
        except RuntimeError:  # a fork has nothing of the handler
            state = "unknown"
        tag = "" if self.tag is None else f", tag={self.tag!r}"
        return f"Job({self.direction} {self.id}, nbytes={self.nbytes}, state={state}{tag})"

    @property
    def result(self) -> Result | None:
        """The outcome, or None until query(), synchronize() or poll() has seen the job end."""
        result: Result | None = self.handler._native.result(self)
        return result

    @property
    def _is_done(self) -> bool:
        """What `result.ok` says, without making a Result. False as long as `result` is None."""
        return self.handler._native.state(self) == "done"

    def query(self) -> bool:
        """Returns whether the job has ended (done, failed or cancelled), without waiting."""
        return self.handler._native.query(self)

    def synchronize(self, timeout: float | None = None) -> None:
        """Blocks the host until the job has ended. See OffloadHandler.synchronize().

        Args:
            timeout (float | None): seconds; None waits forever.

        Raises:
            TransferError: the job failed or was cancelled.
            TimeoutError: the job still runs after the timeout.
        """
        self.handler.synchronize(self, timeout)

    def wait(self, stream: torch.cuda.Stream | None = None, layer_group: int | None = None) -> None:
        """Makes work submitted to the stream after this call wait for the job.

        The host does not wait for the GPU. If the job is still in the software queue, this call
        first gives it, and everything ahead of it in its channel, to the driver; the host waits
        only until the driver has accepted them.

        A failed or cancelled job raises nothing here: the stream goes on, and poll() reports the
        job. Call poll() when the host has the results of the work after the wait, and before it
        uses them: the job has ended by then.

        Args:
            stream (torch.cuda.Stream | None): a stream of any GPU. None is the current stream of
                the cache's device.
            layer_group (int | None): wait only until the layers of this group, and of the groups
                before it, have landed. None waits for the whole job. layer_group_of() maps a layer
                to its group.

        Raises:
            IndexError: the job has no such layer group.
            TypeError: stream is not a torch.cuda.Stream.
            RuntimeError: the stream is being captured into a CUDA graph, which cannot record the
                wait. Raised even if the job has ended.
        """
        group = -1
        if layer_group is not None:
            group = read_int("layer_group", layer_group, INT64_MIN)
            if not 0 <= group < self.layer_groups:
                raise IndexError(
                    f"layer_group is {group}; the job has groups 0 to {self.layer_groups - 1}"
                )
        self.handler._native.let_wait(self, group, stream)

    def layer_group_of(self, layer: int) -> int:
        """The layer group that contains a layer: layer * layer_groups // number of layers.

        Args:
            layer (int): index of the layer's tensor in the layout, or in all layouts of the handler
                one after another.

        Returns:
            int: 0 to layer_groups - 1.

        Raises:
            IndexError: the cache has no such layer.
        """
        layers = self.handler._native.groups.num_layers
        layer = read_int("layer", layer, INT64_MIN)
        if not 0 <= layer < layers:
            raise IndexError(f"layer is {layer}; the cache has layers 0 to {layers - 1}")
        return native.layer_group_of(layer, self.layer_groups, layers)


class OffloadHandler(NotCopyable):
    """Stores blocks of a paged cache into host pages and loads them back, asynchronously.

    A hybrid model passes a list of layouts, one per group of layers, and a pool for each. Every
    argument with ids is then a list too, with one entry per group; the entry is empty for a group
    without blocks in the job. The handler keeps layouts and pools alive.

    Ordering: stores run in order of submission, and so do loads and expedited loads. Two jobs that
    share a block or a page also run in order if one of them writes it. Other jobs may overlap.
    docs/ordering.md has the rules.

    Threads: any thread may call any method, except from a signal handler or `__del__`, which could
    interrupt another call and deadlock on its lock. In a forked child every call raises
    RuntimeError.

    Lifetime: a context manager that closes the handler on exit. A handler that is dropped, or still
    open when the process exits, is closed.

    With a cache on the CPU, store() and load() return after the copy. docs/devices.md lists what is
    refused there.

    Args:
        gpu (PagedLayout | Sequence[PagedLayout]): the cache.
        host (HostPool | Sequence[HostPool]): the host pages: one pool per layout, made for equal
            blocks.
        copy_method (str): "auto" chooses a method for each transfer by its size and layout.
            "copy_engines" chooses among the methods without kernels: see docs/copy_methods.md.
            "strided", "batch", "staged" and "kernel" force a method that the device must have; a
            cache on the CPU has none of them.
        staging_bytes (int): device memory for staged copies, half for stores and half for loads;
            256 MiB by default. Allocated at construction if any transfer could be staged, and freed
            by close().
        submit_thread (bool): submit every copy from a thread per channel, which takes 40 to 250 us
            to wake up. By default the calling thread submits small copies and begins large ones.
        relays (Sequence[int]): other GPUs of the process, by index, whose links take part in large
            transfers. A part of the bytes passes through buffers on these GPUs, which together
            take less than staging_bytes. A relay that gains little is left out, with a warning in
            the log; this is measured once per process for each GPU and relay.
            docs/several_gpus.md has the details.
        exchange (tuple[int, int] | None): (rank, number of ranks), if all ranks load the same pages
            of a shared pool in the same order. Each rank then loads one part of a large load, and
            gets the other parts from the GPUs of the other ranks. Making the handler waits until
            all ranks have made theirs. docs/several_gpus.md says what the ranks must observe.

    Raises:
        TypeError: gpu or host is not a layout or pool, or only one of them is a list.
        ValueError: gpu and host do not match, an option is invalid or not available here, or a pool
            belongs to an open PrefixCache.
        RuntimeError: a pool is closed, or a tensor of a layout has moved.
    """

    def __init__(
        self,
        gpu: PagedLayout | Sequence[PagedLayout],
        host: HostPool | Sequence[HostPool],
        *,
        copy_method: str = AUTO,
        staging_bytes: int = DEFAULT_STAGING_BYTES,
        submit_thread: bool = False,
        relays: Sequence[int] = (),
        exchange: tuple[int, int] | None = None,
    ) -> None:
        options = copy_method, staging_bytes, submit_thread
        self._open(Groups(gpu, host), *options, relays=relays, exchange=exchange)

    def _open(
        self,
        groups: Groups,
        copy_method: str,
        staging_bytes: int,
        submit_thread: bool = False,
        assigns_pages: bool = False,
        relays: Sequence[int] = (),
        exchange: tuple[int, int] | None = None,
    ) -> None:
        """Initializes a handler, also that of a PrefixCache, which assigns all pages."""
        submit_thread = read_switch("submit_thread", submit_thread)
        options = copy_method_options(copy_method, staging_bytes)
        for pool in groups.pools:
            pool._check_new_user(assigns_pages)
        ranks = read_exchange(exchange, groups.device, groups.pools)
        options.may_exchange = ranks is not None
        for relay in usable_relays(groups.device, relays):
            options.add_relay(relay)
        self._tags: dict[int, object] = {}  # of jobs that poll() has not reported
        self._has_warned = False  # about rejected blocks
        self._native = NativeHandler(groups, submit_thread, options)
        if assigns_pages:
            self._native.owner = "prefix cache"
        # The native handler holds the cache and the pools until all jobs have ended.
        weakref.finalize(self, self._native.destroy)
        keep_alive(self._native)
        for pool in groups.pools:
            pool._register_user(self._native, assigns_pages)
        if ranks is not None:
            join_ranks(self._native, ranks)

    def __repr__(self) -> str:
        groups = self._native.groups
        blocks = [layout.num_blocks for layout in groups.layouts]
        pages = [pool.num_pages for pool in groups.pools]
        return (
            f"OffloadHandler(device={groups.device}, "
            f"num_blocks={blocks if len(blocks) > 1 else blocks[0]}, "
            f"num_pages={pages if len(pages) > 1 else pages[0]}, {self._describe_state()})"
        )

    def _describe_state(self) -> str:
        try:
            metrics = self.metrics()
        except RuntimeError:  # a fork has nothing of the handler
            return "unknown"
        channels = metrics.stores, metrics.loads, metrics.expedited
        left = sum(one.submitted - one.done - one.failed - one.cancelled for one in channels)
        state = f"{count_of(left, 'job')} outstanding"
        try:
            self._native.check_open()
        except DeviceLostError:
            return "device lost"
        except RuntimeError:
            return f"closed, {state}" if left else "closed"
        return state

    @property
    def layouts(self) -> tuple[PagedLayout, ...]:
        """The layouts of the cache; after rebind(), the new ones."""
        return self._native.groups.layouts

    @property
    def pools(self) -> tuple[HostPool, ...]:
        """The host pools, one per layout."""
        return self._native.groups.pools

    def store(
        self,
        *unnamed: NoReturn,
        gpu_block_ids: Ids | Sequence[Ids],
        page_ids: Ids | Sequence[Ids],
        first_slot: int | Sequence[int] = 0,
        after: After = None,
        tag: object = None,
    ) -> Job:
        """Copies blocks of the cache to host pages. All arguments must be named.

        In a pool with encoding="lossless", a block that does not fit into its slot is rejected: the
        job fails with a BlocksRejectedError, and all other blocks are stored (Result.rejected).

        GPU block `gpu_block_ids[j]` goes to page `page_ids[(first_slot + j) // k]`, slot
        `(first_slot + j) % k`, where k is `HostPool.blocks_per_page`.

        Until the job has ended, nothing may write the blocks or access the pages, except work on a
        stream that waits for the job (`Job.wait`).

        If the call raises, there is no job and nothing is in flight. After Ctrl-C there may be a
        job, which poll() reports. Any later failure ends the returned job as failed. A store also
        fails if a load into one of its blocks failed or was cancelled and poll() has not reported
        that load yet.

        Args:
            gpu_block_ids: 1-D list, numpy array or CPU tensor of integers, or an array("q"), which
                is the fastest; copied before the call returns.
            page_ids: host pages, in the same form as gpu_block_ids.
            first_slot (int | Sequence[int]): slot of the first block in the first page. The last
                page may be partly filled, too.
            after (torch.cuda.Stream | torch.cuda.Event | tuple | None): what the copy waits for:
                all work submitted so far to this stream of the cache's device, this event of any
                GPU, or all of a tuple of them; () starts at once. None is the calling thread's
                current stream on the cache's device, so that the copy follows the kernels that
                wrote the blocks. A stream or an event is refused for a cache on the CPU, where the
                copy runs inside the call.
            tag: any object; returned in Result.tag and held until poll() has reported the job.

        Returns:
            Job: the submitted job.

        Raises:
            IndexError: an id is out of range, or its page is not pinned yet.
            TypeError: an argument has a wrong type.
            ValueError: arguments do not match, such as the number of blocks and pages.
            DeviceLostError: the device is lost.
            RuntimeError: the handler is closed, a tensor of the cache has moved, the stream is
                being captured into a CUDA graph, or this is a forked child. The message says what
                to do.
            MemoryError: host memory is exhausted.
        """
        if unnamed:
            raise TypeError(_UNNAMED)
        ids = gpu_block_ids, page_ids, first_slot
        return self._submit(STORES, ids, after, tag)

    def load(
        self,
        *unnamed: NoReturn,
        page_ids: Ids | Sequence[Ids],
        gpu_block_ids: Ids | Sequence[Ids],
        first_slot: int | Sequence[int] = 0,
        after: After = None,
        layer_groups: int | None = None,
        expedited: bool = False,
        tag: object = None,
    ) -> Job:
        """Copies host pages to blocks of the cache: store() in the other direction. All arguments
        must be named.

        Work that uses the loaded blocks must wait for the job, on the host or with `Job.wait` on a
        stream. A load fails if the store into one of its pages failed or was cancelled: such a page
        is invalid until it is stored again. A page that was never stored is copied as it is (zeros
        in a new pool), unless the pool is encoded or has checksums.

        With encoded pages or checksums (HostPool.verify), a load rejects blocks that were never
        stored or that their store rejected, and fails with a BlocksRejectedError. If blocks
        do not match their checksums, it fails with a CorruptedPageError. Result.rejected has the
        positions of these blocks, whose contents are undefined; all others were loaded. A stream
        that waits for the job goes on before the checksums were compared; `Job.synchronize()`
        returns after that.

        Args:
            page_ids, gpu_block_ids, first_slot, tag: as in store(). The blocks of the cache are
                overwritten.
            after: as in store(). None lets the copy follow the kernels that read or wrote the
                blocks before.
            layer_groups (int | None): move the layers in this many groups, one after another, so
                that `Job.wait(layer_group=...)` can wait for one group. None is 1. A group for each
                2 MiB, 16 at most, is a good start: more groups take more host time.
            expedited (bool): use a separate channel that overtakes queued and running loads. For
                small loads that a request waits for: without staging memory, a large one keeps SMs
                busy for as long as the link.

        Returns:
            Job: the submitted job.

        Raises what store() does.
        """
        if unnamed:
            raise TypeError(_UNNAMED)
        ids = gpu_block_ids, page_ids, first_slot
        return self._submit(LOADS, ids, after, tag, layer_groups, expedited)

    def jobs_using(self, gpu_block_ids: Ids | Sequence[Ids]) -> list[Job]:
        """Returns the jobs that have not ended and read or write one of these GPU blocks.

        Wait for these jobs before you write the blocks. Each call makes new Job objects, which are
        equal to what store() and load() have returned.

        Args:
            gpu_block_ids: as in store(); -1 means no block.

        Returns:
            list[Job]: in order of submission.

        Raises:
            IndexError: the cache has no such block.
        """
        jobs: list[Job] = self._native.jobs_using(gpu_block_ids, Job, self, self._tags)
        return jobs

    def mark_written(self, page_ids: Ids | Sequence[Ids]) -> None:
        """Marks pages that the caller has written, without a job, as valid.

        After a failed store, loads of its pages fail until these are stored again or marked. Wait
        for the jobs on a page before you write it. With `verify` loads still reject a marked page,
        because its new blocks have no checksums.

        Args:
            page_ids: as in store().

        Raises:
            IndexError: the pool has no such page, or it is not pinned yet.
            ValueError: a store that has not ended writes such a page. None is marked then.
        """
        self._native.mark_written(page_ids)

    def poll(self, timeout: float | None = 0.0) -> list[Result]:
        """Returns the jobs that have ended since the last call.

        Call it regularly: until it has reported a job, the handler keeps the job's result (144
        bytes) and its tag. If Ctrl-C interrupts it, results may be lost.

        Args:
            timeout (float | None): if no job has ended, seconds to wait for one; None waits
                forever. Does not wait if no job is queued or running. Python signal handlers run
                while it waits.

        Returns:
            list[Result]: in the order in which the jobs ended. Each job is reported once, to one
                caller. Empty after the timeout, if there is no job, or if another thread's poll()
                took the results.

        Raises:
            TypeError, ValueError: timeout is not None or a number of seconds from 0 on.
        """
        seconds = read_timeout("timeout", timeout) if timeout != 0 else 0.0
        results: list[Result] = self._native.poll(self._tags)
        if not results and timeout != 0:
            self._native.wait_for_ended(seconds)
            results = self._native.poll(self._tags)
        for result in results:
            if isinstance(result.error, CorruptedPageError):
                log.warning("%s", error_of([result]))
            elif result.rejected and result.direction == "store":
                self._warn_of_rejected_blocks()
        return results

    def synchronize(
        self, jobs: Job | Iterable[Job] | None = None, timeout: float | None = None
    ) -> None:
        """Blocks the host until jobs have ended. poll() still reports them.

        Python signal handlers run while it waits.

        Args:
            jobs (Job | Iterable[Job] | None): None is every job that poll() has not reported.
            timeout (float | None): seconds; None waits forever.

        Raises:
            TransferError: some of the jobs failed or were cancelled; its `results` are theirs.
            TimeoutError: some of the jobs still run after the timeout.
            TypeError: jobs contains something that is not a Job.
            ValueError: a job belongs to another handler.
        """
        own = None
        if jobs is not None:
            if not isinstance(jobs, Iterable) or isinstance(jobs, str) or hasattr(jobs, "_fields"):
                own = [self._check_own("jobs", jobs)]
            else:
                own = [self._check_own(f"jobs[{index}]", job) for index, job in enumerate(jobs)]
        timeout = read_timeout("timeout", timeout)
        answer = self._native.synchronize(own, timeout)
        if isinstance(answer, tuple):
            raise TimeoutError(f"after {timeout:g} s {_describe_unended(answer, own)}")
        if answer:
            return
        if own is None:
            failed = self._native.unreported_failures(self._tags)
        else:
            ended = [job.result for job in own]
            failed = [result for result in ended if result and not result.ok]
        if failed:  # empty if another thread has polled the failed jobs meanwhile
            raise error_of(failed)

    def cancel(self, job: Job) -> bool:
        """Cancels a job that has not ended.

        A queued job ends at once and copies nothing. A job that the driver already has runs to its
        end, and its destination is undefined. The pages of a cancelled store are invalid until they
        are stored again.

        Args:
            job (Job): a job of this handler.

        Returns:
            bool: True if the job is or will be reported as cancelled; False if it had already
                ended.

        Raises:
            TypeError: job is not a Job.
            ValueError: the job belongs to another handler.
        """
        return self._native.cancel(self._check_own("job", job))

    def metrics(self) -> Metrics:
        """Returns a snapshot of the counters, gauges and histograms of all channels."""
        return read_metrics(self._native)

    def rebind(self, gpu: PagedLayout | Sequence[PagedLayout]) -> None:
        """Waits for all jobs, then continues with a cache at other addresses.

        If it raises, the handler keeps the old cache.

        Args:
            gpu (PagedLayout | Sequence[PagedLayout]): new layouts with the same block sizes.

        Raises:
            TypeError: gpu is not a layout, or a list where the handler has a single layout.
            ValueError: the new cache does not match the pools, or is on another device.
            RuntimeError: the handler is closed, a tensor of the new cache has moved, another thread
                submits meanwhile, or the driver refuses what the new cache needs.
        """
        self._native.check_open()
        self._rebind_to(self._native.groups.moved_to(gpu))

    def _rebind_to(self, groups: Groups) -> None:
        """rebind() to groups that may also have other pools, as those of a PrefixCache can."""
        pools = [pool for pool in groups.pools if pool not in self.pools]
        for pool in pools:
            pool._check_new_user(assigns_pages=True)
        self._native.synchronize(None, None)
        self._native.move_to(groups)
        for pool in pools:
            pool._register_user(self._native, assigns_pages=True)

    def close(self) -> None:
        """Refuses new jobs, waits for all jobs, and frees threads, streams and events.

        poll() still reports the remaining results. Idempotent. Returns at once if the device is
        lost. Ctrl-C interrupts the wait; the handler then accepts no more jobs, and another close()
        continues.

        Raises:
            DeviceLostError: a relay is lost, and the cache's GPU still waits for it after a second.
                The cache and the pages stay allocated until the process ends.
        """
        self._native.was_closed = True
        self._native.close()

    def __enter__(self) -> OffloadHandler:
        self._native.check_open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _warn_of_rejected_blocks(self) -> None:
        """Warns, once, if stores reject so many blocks that raw pages are better."""
        if self._has_warned:
            return
        stores = self.metrics().stores
        is_common = stores.rejected_blocks > _COMMON_REJECTS * stores.encoded_blocks
        if stores.encoded_blocks < _WARN_AFTER_BLOCKS or not is_common:
            return
        self._has_warned = True
        log.warning(
            "%d of %d encoded blocks do not fit into their slots and were rejected; make the host "
            "pool with encoding='raw'",
            *(stores.rejected_blocks, stores.encoded_blocks),
        )

    # What a PrefixCache calls: _submit(), _check_options(), and _native.

    def _submit(
        self,
        channel: int,
        ids: tuple[Any, Any, Any],
        after: object,
        tag: object,
        layer_groups: int | None = None,
        expedited: bool = False,
        reserved: native.Reservation | None = None,
        computed_in: Sequence[Ids] | None = None,
    ) -> Job:
        """store() and load(), also those of a PrefixCache.

        `ids` are gpu_block_ids, page_ids and first_slot. The job takes the pages that are
        `reserved`, if it is submitted, and poll() ends the reservation. computed_in: the GPU blocks
        from which the stored ones were computed. If a load into one of them was not reported yet,
        the store runs after it, and fails with it.
        """
        # Each Python function that this path calls costs 3 us or more when it is not in the caches.
        submitting, groups = self._native, self._native.groups
        try:
            # True and False need no call.
            if expedited is not False and expedited is not True:
                expedited = read_switch("expedited", expedited)
            num_groups = 1
            if layer_groups is not None:
                num_groups = groups.read_layer_groups(layer_groups)
            if native.cache_has_moved(groups.guard.native):
                groups.guard.check()
            for memory in groups.foreign:
                memory.check_open()
            resolved = resolve_after(after, groups.device)
            job = Job(EXPEDITED if expedited else channel, num_groups, self, tag)
            submitting.submit(job, *ids, resolved, self._tags, reserved, computed_in)
        except Exception:
            submitting.check_open()  # whatever else is wrong, this is said first
            raise
        return job

    def _check_options(self, after: object, layer_groups: int | None = None) -> None:
        """Raises what _submit() would raise for these options, if there is nothing to submit."""
        self._native.check_open()
        if layer_groups is not None:
            self._native.groups.read_layer_groups(layer_groups)
        resolve_after(after, self._native.groups.device)

    def _check_own(self, name: str, job: object) -> Job:
        if not isinstance(job, Job):
            own = next((own for own in ("job", "jobs") if hasattr(job, own)), None)  # as Stored has
            right = f"its {own}" if own else "the Job that store() or load() returned"
            raise TypeError(f"{name} is {kind_of(job)}; pass {right}")
        if job.handler is not self:
            raise ValueError(
                f"{name} is {job.direction} {job.id} of another handler; pass it to that handler"
            )
        return job


def _describe_unended(unended: tuple[int, str, int], jobs: Sequence[Job] | None) -> str:
    """What synchronize() says of these jobs, None for all, when some have not ended in time."""
    left, direction, first = unended
    count = left if jobs is None else len(jobs)
    have = f"{count_of(count, 'job')} {'has' if count == 1 else 'have'}"
    out_of = "" if jobs is None else f"{left} of "
    return f"{out_of}{have} not ended; the first is {direction} {first}"
