"""Each allocation of the native library fails once: every job ends, the handler goes on, and a
block manager keeps its state.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
from drained import drain
from encoded_cache import EncodedCache
from failing_allocations import FailingAllocation, each_fails, number_of_failures
from patience import PATIENCE, in_time
from simulated_cache import CURRENT, SIDE, SimulatedCache, Stream, needs_kernels
from simulated_driver import DEVICE, Driver, without_cuda

from torch_kvswap._native.loader import native
from torch_kvswap.host_pool.pool import HostPool
from torch_kvswap.layout import PagedLayout
from torch_kvswap.offload.handler import Job, OffloadHandler
from torch_kvswap.prefix.cache import PrefixCache
from torch_kvswap.prefix.manager import BlockManager
from torch_kvswap.results import TransferError

# What a call may raise because of that, and whom a test may make fail besides.
TOLD = ("out of host memory", "failed: ", "made up by the simulated driver", "was cancelled")


class Attempt:
    """A scenario with a handler of its own, of which one allocation fails."""

    def __init__(self, driver: Driver, allocation: FailingAllocation, **options: Any) -> None:
        driver.reset()
        self.begin = allocation.begin  # from then on the allocations are counted
        self.driver = driver
        self.sim = SimulatedCache(driver, blocks=600, pages=600, **options)
        self.jobs: list[tuple[Job, int, int]] = []
        self.reported: list[int] = []
        self._synchronized = driver.calls("cuStreamSynchronize")
        self._ends = threading.Event()
        self._releasing = threading.Thread(target=self._release_for_who_waits)
        self._releasing.start()

    def is_synchronized(self) -> bool:
        """Whether a job failed in the middle of its copies, and waits for those that were submitted."""
        return self.driver.calls("cuStreamSynchronize") > self._synchronized

    def _release_for_who_waits(self) -> None:
        while not self._ends.wait(0.001):
            if self.is_synchronized():
                self.release()

    def release(self) -> None:
        for hold in list(self.sim._holds):
            self.sim.release(hold)

    def stop(self) -> None:
        self._ends.set()
        self._releasing.join()

    def call(self, body: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """What it returns; None when it raised what the test provokes."""
        try:
            return body(*args, **options)
        except (MemoryError, TimeoutError):
            return None
        except TransferError as error:
            if any(
                result.state != "cancelled" and not told(result.error) for result in error.results
            ):
                raise
        except RuntimeError as error:
            if not told(error):
                raise
        return None

    def submit(
        self, kind: str, block: int, page: int, count: int = 1, **options: Any
    ) -> Job | None:
        """Blocks from `block` on and pages from `page` on, which no other job writes."""
        blocks, pages = range(block, block + count), range(page, page + count)
        job = self.call(self.sim.submit, kind, list(blocks), list(pages), **options)
        if job is not None:
            self.jobs += [(job, *ids) for ids in zip(blocks, pages, strict=True)]
        return job

    def poll(self) -> None:
        results = self.call(self.sim.handler.poll) or []
        self.reported += [result.job_id for result in results]

    def run(self) -> None:
        self.driver.run()

    def run_until_ended(self, job: Job) -> None:
        """Also where a worker thread has yet to give it to the device."""
        assert in_time(lambda: self.driver.run() >= 0 and job.query()), "a job does not end"
        self.call(self.sim.handler.synchronize, job, PATIENCE)

    def check(self) -> None:
        """All is as it should be, whatever has failed."""
        sim = self.sim
        self.release()
        self.driver.set_mode("immediate")
        jobs = {job.id: job for job, _, _ in self.jobs}
        assert in_time(lambda: all(job.query() for job in jobs.values())), "a job does not end"
        self.reported += [result.job_id for result in sim.handler.poll()]
        assert sorted(self.reported) == sorted(jobs), (self.reported, jobs)
        for job, block, page in self.jobs:
            assert job.result is not None
            assert job.result.error is None or told(job.result.error), job.result
            if job.result.ok:
                assert torch.equal(sim.block(block), sim.page(page)), job.result
        sim.host.pages[599].fill_(7)
        sim.handler.synchronize(sim.handler.load(page_ids=[599], gpu_block_ids=[599]), PATIENCE)
        sim.handler.synchronize(sim.handler.store(gpu_block_ids=[599], page_ids=[598]), PATIENCE)
        assert sim.page(598).unique().tolist() == [7]
        sim.handler.close()
        assert not any(self.driver.live(what) for what in ("events", "streams", "allocations"))


def told(error: BaseException | None) -> bool:
    return "device is lost" not in str(error) and any(text in str(error) for text in TOLD)


# Blocks and pages below 100 are for the first jobs, the others for those that follow.


def submit_some(attempt: Attempt) -> None:
    attempt.begin()
    attempt.submit("store", 1, 1)
    attempt.submit("load", 101, 1)
    attempt.submit("expedited", 102, 1)
    attempt.submit("store", 3, 3, count=5, after=None)
    attempt.run()
    attempt.poll()


def wait_behind_streams(attempt: Attempt) -> None:
    attempt.begin()
    attempt.sim.held(CURRENT)
    attempt.sim.held(SIDE)
    for i in range(3):
        attempt.submit("store", 10 + i, 10 + i, after=None)
        attempt.submit("load", 110 + i, 30 + i, after=Stream(SIDE))
    attempt.run()
    early = [job for job, _, _ in attempt.jobs if job.query() and job.result and job.result.ok]
    assert not early or attempt.is_synchronized(), "a job did not wait for its stream"
    attempt.release()
    attempt.run()
    attempt.poll()


def fill_the_queue(attempt: Attempt) -> None:
    hold = attempt.sim.held(SIDE)
    for i in range(70):  # more than are given to the device at once
        if i == 63:
            attempt.begin()
        attempt.submit("store", i, i, after=Stream(SIDE))
    attempt.submit("load", 200, 69)  # behind a store that is queued
    job = attempt.submit("load", 201, 301)
    attempt.sim.release(hold)
    attempt.run()
    if job is not None:
        attempt.call(job.wait)
    attempt.run()
    attempt.poll()


def leave_a_job_to_the_worker(attempt: Attempt) -> None:
    attempt.begin()
    store = attempt.submit("store", 0, 0, count=300)
    load = attempt.submit("load", 300, 300, count=200, layer_groups=2)
    for job in (store, load):
        if job is not None:
            attempt.run_until_ended(job)  # the worker has made its allocations


def wait_and_cancel(attempt: Attempt) -> None:
    attempt.begin()
    handler = attempt.sim.handler
    attempt.sim.held(SIDE)
    jobs = [attempt.submit("store", i, i, after=Stream(SIDE)) for i in range(3)]
    attempt.call(handler.synchronize, [job for job in jobs if job], 0.001)
    for job in jobs[1:]:
        if job is not None:
            attempt.call(handler.cancel, job)
    attempt.submit("load", 102, 2)  # of a page that is invalid
    for job in jobs:
        if job is not None:
            attempt.call(job.wait, Stream(CURRENT))
    attempt.call(handler.metrics)
    attempt.release()
    for job in jobs:
        if job is not None:
            attempt.run_until_ended(job)
    attempt.call(handler.synchronize, [job for job in jobs if job], PATIENCE)
    for job, _, _ in attempt.jobs:
        attempt.run_until_ended(job)
    attempt.call(handler.synchronize, None, PATIENCE)


def fail_copies(attempt: Attempt) -> None:
    attempt.begin()
    for i in range(4):
        attempt.driver.fail_copy(0)
        attempt.submit("load", 100 + i, i)
    attempt.driver.fail_copy(-1)
    hold = attempt.sim.held(SIDE)
    store = attempt.submit("store", 20, 20, after=Stream(SIDE))
    load = attempt.submit("load", 120, 20)
    attempt.sim.release(hold)
    attempt.driver.fail("cuEventElapsedTime")
    attempt.run()
    for job in (store, load):
        if job is not None:
            attempt.run_until_ended(job)
    # A fault that nothing has met is not for what follows: with both the device would be lost.
    cuda = attempt.driver.cuda
    cuda.call("cuEventElapsedTime", ctypes.byref(ctypes.c_float()), 0, 0)
    attempt.driver.fail("cuStreamQuery")
    attempt.submit("store", 30, 30, after=None)
    attempt.run()
    attempt.poll()
    cuda.call("cuStreamQuery", CURRENT)


def move_the_cache(attempt: Attempt) -> None:
    attempt.begin()
    sim = attempt.sim
    attempt.submit("store", 1, 1)
    attempt.run()
    attempt.poll()
    attempt.jobs.clear()  # of the cache as it was
    attempt.reported.clear()
    drain(sim.handler)
    attempt.reported += [result.job_id for result in sim.handler.poll()]
    attempt.reported.clear()
    new = [tensor.clone() for tensor in sim.tensors]
    moved = PagedLayout(new)
    for tensor in new:
        attempt.driver.adopt(tensor, DEVICE)
    moved.device = torch.device("cuda", 0)

    def rebind() -> bool:
        sim.handler.rebind(moved)
        return True

    if attempt.call(rebind):
        sim.tensors = new
    attempt.submit("store", 2, 2)
    attempt.submit("load", 103, 2)
    attempt.run()
    attempt.poll()


def close_it(attempt: Attempt) -> None:
    """Another handler of the same cache."""
    attempt.begin()
    other = attempt.call(OffloadHandler, attempt.sim.layout, attempt.sim.host)
    if other is None:
        return
    attempt.call(other.store, gpu_block_ids=[1], page_ids=[1], after=())
    attempt.run()
    while attempt.call(lambda: other.close() is None) is None:
        pass


SCENARIOS: dict[str, tuple[Callable[[Attempt], None], dict[str, Any]]] = {
    "submit some": (submit_some, {}),
    "wait behind streams": (wait_behind_streams, {}),
    "fill the queue": (fill_the_queue, {}),
    "leave a job to the worker": (leave_a_job_to_the_worker, {"layers": 2}),
    "wait and cancel": (wait_and_cancel, {}),
    "wait and cancel, threaded": (wait_and_cancel, {"submit_thread": True}),
    "fail copies": (fail_copies, {}),
    "move the cache": (move_the_cache, {}),
    "close it": (close_it, {}),
}


def sweep(driver: Driver, name: str) -> None:
    scenario, options = SCENARIOS[name]

    def run(allocation: FailingAllocation) -> None:
        attempt = Attempt(driver, allocation, **options)
        scenario(attempt)
        attempt.stop()
        allocation.end()
        attempt.check()

    each_fails(run)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name == "submit some" else [pytest.mark.slow])
        for name in SCENARIOS
    ],
)
@without_cuda
def test_every_job_ends_whichever_allocation_fails(name: str) -> None:
    assert number_of_failures(sweep, name) > 10


def run_and_see(driver: Driver, jobs: list[Job]) -> bool:
    """Whether all jobs have ended, after the device did all it can do."""
    driver.run()
    return all([job.query() for job in jobs])


def sweep_encoded(driver: Driver, method: str) -> None:
    each_fails(partial(copy_with_rejected_blocks, driver, method))


def copy_with_rejected_blocks(driver: Driver, method: str, allocation: FailingAllocation) -> None:
    driver.reset()
    cache = EncodedCache(driver, copy_method=method)
    cache.spoil(2)
    before = {block: cache.block(block) for block in (1, 3, 8)}
    live = driver.live("allocations")
    allocation.begin()
    jobs = []
    driver.set_mode("immediate")
    with suppress(MemoryError, RuntimeError):
        gpu, host = cache.layouts[0], cache.pools[0]
        with OffloadHandler(gpu, host, copy_method=method, staging_bytes=1 << 20) as other:
            other.store(gpu_block_ids=[1], page_ids=[15], after=())
    driver.set_mode("manual")
    with suppress(MemoryError):
        jobs.append(cache.store([1, 2, 3], [0, 1, 2]))
        jobs.append(cache.load([0, 1, 2], [7, 8, 9]))
    assert in_time(partial(run_and_see, driver, jobs)), "a job does not end"
    allocation.end()
    assert driver.live("allocations") == live
    for job, targets in zip(jobs, ((), (7, 8, 9)), strict=False):
        assert job.result is not None
        if job.result.rejected:
            assert job.result.rejected == (1,)
            for target, source in zip(targets, (1, 8, 3), strict=False):
                assert cache.is_same(target, before[source])
        else:
            assert told(job.result.error), job.result
    drain(cache.handler)
    cache.handler.poll()
    driver.set_mode("immediate")
    cache.store([1, 3], [1, 4]).synchronize(PATIENCE)
    cache.load([1, 4], [5, 6]).synchronize(PATIENCE)
    assert cache.is_same(5, before[1])
    assert cache.is_same(6, before[3])
    cache.handler.close()


@pytest.mark.parametrize("method", ["staged", pytest.param("kernel", marks=pytest.mark.slow)])
@needs_kernels
@without_cuda
def test_no_rejected_block_is_lost_whichever_allocation_fails(method: str) -> None:
    assert number_of_failures(sweep_encoded, method) > 10


CALLS: dict[str, Callable[[BlockManager], Any]] = {
    "lookup": lambda manager: manager.lookup(["a", "b"], again=True, hold=True).lease,
    "prepare_load": lambda manager: manager.prepare_load(["a", "b"]),
    "prepare_store": lambda manager: manager.prepare_store(["a", "c", "d"]),
    "hold": lambda manager: manager.prepare_store(["a", "c", "d"], hold=True),
    "promote": lambda manager: manager._promote(["a", "c", "d"], manager.resets),
    "hold_due": lambda manager: manager._hold_due(2, 0),
}


def sweep_calls(_: Driver, name: str) -> None:
    each_fails(partial(call_a_manager, CALLS[name]))


def call_a_manager(call: Callable[[BlockManager], Any], allocation: FailingAllocation) -> None:
    """After a failure the call is made again."""
    manager = BlockManager(3, below_policy="all")
    manager.complete(manager.prepare_store(["a", "b"]))
    before = manager.stats(), manager.lookup(["a", "b"], again=True)
    allocation.begin()
    try:
        call(manager)
    except MemoryError:
        allocation.end()
        assert allocation.has_failed
        assert manager.stats() == before[0]
        assert manager.lookup(["a", "b"], again=True) == before[1]
        assert call(manager) is not None
    else:
        allocation.end()
        assert not allocation.has_failed


@pytest.mark.parametrize("name", CALLS)
@without_cuda
def test_a_block_manager_survives_whichever_allocation_fails(name: str) -> None:
    assert number_of_failures(sweep_calls, name) > 0


def sweep_prefixes(_: Driver, name: str) -> None:
    each_fails(use_a_prefix_cache)


def use_a_prefix_cache(allocation: FailingAllocation) -> None:
    layout = PagedLayout([torch.arange(8)[:, None].expand(8, 4).contiguous()])
    with PrefixCache(layout, HostPool(layout, 4)) as prefixes:
        prefixes.store(["a"], [1])
        allocation.begin()
        for call in (
            lambda: prefixes.store(["a", "b"], [1, 2]),
            prefixes.poll,
            lambda: prefixes.load(["a"], [3]),
            prefixes.poll,
        ):
            with suppress(MemoryError):
                call()
        allocation.end()
        prefixes.poll()
        stats = prefixes.stats()
        assert stats.free_pages + stats.idle_pages == stats.pages
        prefixes.store(["c"], [4])
        prefixes.poll()
        assert prefixes.load(["c"], [5]) is not None
        assert layout.tensors[0][5].tolist() == [4] * 4


@without_cuda
def test_prefix_caches_hold_nothing_after_failed_allocations() -> None:
    assert number_of_failures(sweep_prefixes) > 10


def sweep_touch(_: Driver, name: str) -> None:
    each_fails(touch)


def touch(allocation: FailingAllocation) -> None:
    nbytes = 96 << 20
    address = native.map_host(-1, nbytes)
    allocation.begin()
    with suppress(MemoryError):
        native.touch_host(address, nbytes, 3, False, [])
    allocation.end()
    native.unmap_host(address, nbytes)


@without_cuda
def test_pages_are_touched_by_fewer_threads() -> None:
    assert number_of_failures(sweep_touch) > 2
