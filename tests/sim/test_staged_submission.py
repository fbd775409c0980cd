"""Who gives a staged transfer to the driver: the calling thread all of a small one and the first
pieces of a large one, and the worker, or a thread that waits for the job, the rest.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import pytest
import torch
from patience import in_time
from simulated_cache import SIDE, Stream, needs_kernels, rest, threads
from simulated_driver import Driver, on_device, pool, simulated
from torch import Tensor

from torch_kvswap import DeviceLostError, OffloadHandler, TransferError
from torch_kvswap.offload.handler import Job

BLOCKS = 64  # of 256 KiB, more than the calling thread submits
ALL = list(range(BLOCKS))
STAGING = 32 << 20  # a piece has 8 MiB at most
LAUNCH = "cuLaunchKernel"  # once for each piece
ROUNDS, JOBS = 3, 8  # of a random test, and of each round
KINDS = pytest.mark.parametrize("kind", ["store", "load"])
WAITS = pytest.mark.parametrize("waits", ["on the host", "on a stream"])


@dataclass
class Launches:
    """How many pieces were given to the driver, by the calling thread and by any."""

    driver: Driver
    here: int = 0
    all: int = 0

    def __post_init__(self) -> None:
        self.here, self.all = self.now()

    def now(self) -> tuple[int, int]:
        """Since this object was made."""
        calls = self.driver.calls_here(LAUNCH), self.driver.calls(LAUNCH)
        return calls[0] - self.here, calls[1] - self.all


class Staged:
    """A handler that stages all transfers, and the worker of its stores or loads, which sleeps."""

    def __init__(self, driver: Driver, handler: OffloadHandler, kind: str, tensors: Tensor) -> None:
        self.driver = driver
        self.handler = handler
        self.kind = kind
        self.tensors = tensors
        self.pages = handler.pools[0].pages[:, 0]
        before = threads()
        handler.synchronize(self.submit())  # starts the worker
        (self.worker,) = threads() - before
        assert in_time(lambda: rest({self.worker}))
        handler.poll()
        tensors.random_(256)
        self.pages.random_(256)
        driver.log()

    def submit(
        self,
        kind: str | None = None,
        ids: list[int] = ALL,
        layer_groups: int | None = None,
    ) -> Job:
        """Block i is stored to page i, or loaded from it."""
        if (kind or self.kind) == "store":
            return self.handler.store(gpu_block_ids=ids, page_ids=ids, after=())
        return self.handler.load(
            page_ids=ids, gpu_block_ids=ids, after=(), layer_groups=layer_groups
        )

    def wait(self, job: Job, waits: str, seconds: float | None = None) -> None:
        if waits == "on the host":
            self.handler.synchronize(job, timeout=seconds)
        else:
            job.wait(Stream(SIDE))

    def is_right(self) -> bool:
        """All blocks were copied."""
        return torch.equal(self.pages, self.tensors.transpose(0, 1).reshape(BLOCKS, -1))


@contextmanager
def staged(
    driver: Driver,
    kind: str = "store",
    submit_thread: bool = False,
    layers: int = 2,
    staging_bytes: int = STAGING,
) -> Iterator[Staged]:
    tensors = torch.randint(256, (layers, BLOCKS, (256 << 10) // layers), dtype=torch.uint8)
    layout = on_device(driver, tensors)
    with OffloadHandler(
        layout,
        pool(driver, layout, BLOCKS),
        copy_method="staged",
        staging_bytes=staging_bytes,
        submit_thread=submit_thread,
    ) as handler:
        yield Staged(driver, handler, kind, tensors)


@KINDS
@needs_kernels
@simulated
def test_the_worker_gives_the_rest_of_large_jobs(driver: Driver, kind: str) -> None:
    with staged(driver, kind) as sim:
        launches = Launches(driver)
        with driver.stopped(sim.worker):
            job = sim.submit()
            begun, by_all = launches.now()
            assert begun == by_all > 0
            assert not job.query()
        assert in_time(job.query)
        here, by_all = launches.now()
        assert here == begun < by_all
        assert sim.is_right()


# A piece has 256 KiB.


@contextmanager
def many_pieces(driver: Driver) -> Iterator[OffloadHandler]:
    layout = on_device(driver, torch.randint(256, (1, 2, 4 << 20), dtype=torch.uint8))
    pages = pool(driver, layout, 2)
    with OffloadHandler(layout, pages, copy_method="staged", staging_bytes=1 << 20) as handler:
        yield handler


@KINDS
@needs_kernels
@simulated
def test_the_caller_only_begins_a_large_block(driver: Driver, kind: str) -> None:
    with many_pieces(driver) as handler:
        launches = Launches(driver)
        submit = handler.store if kind == "store" else handler.load
        job = submit(gpu_block_ids=[1], page_ids=[0], after=())
        assert launches.now()[0] == 12  # 3 MiB
        job.synchronize()
        assert launches.now()[1] == 16


@needs_kernels
@simulated
def test_all_pieces_count_as_queue_entries(driver: Driver) -> None:
    driver.set_mode("manual")
    with many_pieces(driver) as handler:
        hold = driver.hold(SIDE)
        try:
            for _ in range(20):
                handler.store(gpu_block_ids=[1], page_ids=[0], after=Stream(SIDE))
            # Each of its 16 pieces takes three entries.
            assert in_time(lambda: handler.metrics().stores.running == 12)
            assert handler.metrics().stores.queued == 8
        finally:
            driver.release(hold)
            driver.set_mode("immediate")


@needs_kernels
@simulated
def test_the_caller_gives_the_first_layer_groups(driver: Driver) -> None:
    layers = 32  # of 512 KiB
    with staged(driver, "load", layers=layers) as sim:
        launches = Launches(driver)
        with driver.stopped(sim.worker):
            job = sim.submit(layer_groups=layers)
            begun, _ = launches.now()
            assert 0 < begun < layers / 2
        sim.handler.synchronize(job)
        assert launches.now()[1] == layers
        assert sim.is_right()


@needs_kernels
@simulated
def test_waiting_for_a_layer_gives_no_later_ones(driver: Driver) -> None:
    layers = 32
    with staged(driver, "load", layers=layers) as sim:
        launches = Launches(driver)
        with driver.stopped(sim.worker):
            job = sim.submit(layer_groups=layers)
            begun, _ = launches.now()
            job.wait(Stream(SIDE), layer_group=0)
            assert launches.now() == (begun, begun)
            job.wait(Stream(SIDE), layer_group=begun)
            assert begun < launches.now()[1] < layers
        sim.handler.synchronize(job)
        assert sim.is_right()


@KINDS
@WAITS
@needs_kernels
@simulated
def test_a_waiting_thread_gives_the_rest(driver: Driver, kind: str, waits: str) -> None:
    with staged(driver, kind) as sim:
        launches = Launches(driver)
        with driver.stopped(sim.worker):
            job = sim.submit()
            begun, _ = launches.now()
            sim.wait(job, waits)
            here, by_all = launches.now()
            assert begun < here == by_all
        sim.handler.synchronize(job)
        assert sim.is_right()


@KINDS
@pytest.mark.parametrize("call", [LAUNCH, "cuEventRecord", "cuStreamWaitEvent"])
@needs_kernels
@simulated
def test_a_failed_rest_leaves_nothing_in_flight(driver: Driver, kind: str, call: str) -> None:
    with staged(driver, kind) as sim:
        with driver.stopped(sim.worker):
            driver.set_mode("manual")  # nothing runs unless it is waited for
            job = sim.submit()
            assert driver.pending() != ""
            driver.fail(call)
        with pytest.raises(TransferError, match=call):
            sim.handler.synchronize(job)
        assert driver.pending() == ""
        driver.set_mode("immediate")
        sim.handler.poll()
        sim.handler.synchronize(sim.submit("store"))  # writes again what the failed one should
        sim.handler.synchronize(sim.submit("load"))
        assert sim.is_right()


@needs_kernels
@simulated
def test_joined_jobs_before_a_layer_all_end(driver: Driver) -> None:
    """Whichever of their pieces the driver refuses."""
    for nth in range(1, 9):
        with staged(driver, "load") as sim:
            with driver.stopped(sim.worker):
                jobs = [sim.submit(), sim.submit(ids=ALL[:32]), sim.submit(ids=ALL[32:])]
                jobs.append(sim.submit(layer_groups=2))
                driver.fail(LAUNCH, nth)
                jobs[-1].wait(Stream(SIDE), layer_group=0)
            with suppress(TransferError):
                sim.handler.synchronize(jobs, timeout=60)
            assert all(job.result for job in jobs)


@KINDS
@needs_kernels
@simulated
def test_a_cancelled_begun_job_ends_with_its_copies(driver: Driver, kind: str) -> None:
    with staged(driver, kind) as sim:
        with driver.stopped(sim.worker):
            job = sim.submit()
            assert sim.handler.cancel(job)
            assert not job.query()
        assert in_time(job.query)
        assert [result.state for result in sim.handler.poll()] == ["cancelled"]
        assert driver.pending() == ""
        assert sim.is_right()


@KINDS
@needs_kernels
@simulated
def test_a_lost_device_ends_begun_jobs(driver: Driver, kind: str) -> None:
    with staged(driver, kind) as sim:
        with driver.stopped(sim.worker):
            jobs = [sim.submit(), sim.submit(ids=[5])]
            driver.lose()
        assert in_time(lambda: all(job.query() for job in jobs))
        errors = [str(result.error) for result in sim.handler.poll()]
        assert len(errors) == 2
        assert all("the device is lost" in error for error in errors)


@KINDS
@WAITS
@needs_kernels
@simulated
def test_a_waiter_that_finds_loss_ends_jobs(driver: Driver, kind: str, waits: str) -> None:
    with staged(driver, kind) as sim, driver.stopped(sim.worker):
        job = sim.submit()
        driver.lose()
        with suppress(DeviceLostError):  # only on the host
            sim.wait(job, waits, seconds=1)
        assert job.result is not None
        assert isinstance(job.result.error, DeviceLostError)


@KINDS
@needs_kernels
@simulated
def test_closing_waits_for_a_begun_job(driver: Driver, kind: str) -> None:
    with staged(driver, kind) as sim:
        job = sim.submit()
        sim.handler.close()
        assert job.result is not None
        assert job.result.ok
        assert sim.is_right()


@pytest.mark.parametrize("counts", [(BLOCKS, BLOCKS), (1, BLOCKS)])
@needs_kernels
@simulated
def test_partly_unstaged_large_jobs_go_to_the_worker(
    driver: Driver, counts: tuple[int, int]
) -> None:
    """The first group has large fragments, which copy engines copy."""
    layouts = [
        on_device(driver, torch.zeros(layers, BLOCKS, size, dtype=torch.uint8))
        for layers, size in ((1, 1 << 20), (8, 16 << 10))
    ]
    pools = [pool(driver, layout, BLOCKS) for layout in layouts]
    with OffloadHandler(layouts, pools, copy_method="auto", staging_bytes=STAGING) as handler:
        calls = LAUNCH, "cuMemcpyAsync", "cuMemcpyBatchAsync"
        before = [driver.calls_here(call) for call in calls]
        ids = [range(count) for count in counts]
        job = handler.store(gpu_block_ids=ids, page_ids=ids, after=())
        assert [driver.calls_here(call) for call in calls] == before
        assert in_time(job.query)
        assert job.result is not None
        assert job.result.copy_method == "batch"
        assert driver.calls(LAUNCH) > 0


@KINDS
@needs_kernels
@simulated
def test_with_a_submit_thread_the_caller_gives_nothing(driver: Driver, kind: str) -> None:
    with staged(driver, kind, submit_thread=True) as sim:
        launches = Launches(driver)
        job = sim.submit()
        assert in_time(job.query)
        here, by_all = launches.now()
        assert here == 0 < by_all
        assert sim.is_right()
