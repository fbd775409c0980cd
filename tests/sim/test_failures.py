"""Any driver call may fail: its job fails once, with a reason, and no other job does."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress

import pytest
import torch
from patience import PATIENCE, in_time
from simulated_cache import (
    CHANNELS,
    CURRENT,
    SIDE,
    SimulatedCache,
    Stream,
    let_threads_look,
    new_threads,
    rest,
    run_until,
    states,
    threads,
)
from simulated_driver import Driver, cache, simulated

from torch_kvswap.offload.handler import Job, OffloadHandler
from torch_kvswap.results import DeviceLostError, TransferError

OTHER = 44  # a third stream of the caller


def failure(job: Job) -> str:
    """Why the job has failed."""
    assert job.result is not None
    assert (job.result.state, job.result.ok) == ("failed", False)
    return str(job.result.error)


# One call fails

STEPS = {
    "stream": [
        ("cuStreamQuery", 1),
        ("cuEventCreate", 1),  # for the moment, the start and the end
        ("cuEventCreate", 2),
        ("cuEventCreate", 3),
        ("cuEventRecord", 1),
        ("cuStreamWaitEvent", 1),
        ("cuEventRecord", 2),
        ("cuMemcpyAsync", 1),
        ("cuEventRecord", 3),
    ],
    "event": [
        ("cuEventQuery", 1),
        ("cuStreamWaitEvent", 1),
        ("cuStreamQuery", 1),
        ("cuEventRecord", 1),
        ("cuStreamWaitEvent", 2),
        ("cuMemcpyAsync", 1),
    ],
    "another channel": [("cuStreamWaitEvent", 1), ("cuEventRecord", 1), ("cuEventRecord", 2)],
    "layer groups": [
        ("cuEventCreate", 3),
        ("cuMemcpyAsync", 1),
        ("cuEventRecord", 2),
        ("cuMemcpyAsync", 2),
        ("cuEventRecord", 3),
    ],
    "several fragments": [("cuMemcpyBatchAsync", 1)],
}


@pytest.mark.parametrize(
    ("behind", "function", "nth"),
    [(behind, function, nth) for behind, steps in STEPS.items() for function, nth in steps],
)
@simulated
def test_a_failed_call_fails_one_job_only(
    driver: Driver, behind: str, function: str, nth: int
) -> None:
    live = driver.live("events"), driver.live("streams")
    kind = "load" if behind == "layer groups" else "store"
    options = {"layer_groups": 2} if behind == "layer groups" else {}
    with SimulatedCache(
        driver, layers=2 if behind in ("layer groups", "several fragments") else 1
    ) as sim:
        event = sim.event(SIDE)  # which happens when the driver is asked to run or to synchronise
        options["after"] = {"stream": Stream(SIDE), "event": event}.get(behind, ())
        sim.load(2 if behind == "another channel" else 1, 9)
        driver.fail(function, nth)
        job = sim.submit(kind, [2], [2], **options)
        assert job.query()
        assert function in failure(job)
        sim.submit(kind, [3], [3], **options)
        assert_others_are_done(sim, job)
        sim.handler.close()
        driver.cuda.destroy_event(event.cuda_event)
    assert (driver.live("events"), driver.live("streams")) == live


@pytest.mark.parametrize(
    ("function", "nth"),  # behind the calls of the submission, and of the job in front of it
    [("cuStreamWaitEvent", 1), ("cuEventRecord", 4), ("cuMemcpyAsync", 2), ("cuEventRecord", 5)],
)
@simulated
def test_a_failed_call_fails_one_queued_job(driver: Driver, function: str, nth: int) -> None:
    with SimulatedCache(driver) as sim:
        sim.fill("store")
        sim.event(SIDE)
        driver.fail(function, nth)
        job = sim.store(2, 2, after=Stream(SIDE))
        job.wait(Stream(OTHER))  # what is joined is tried again, each job by itself
        assert function in failure(job)
        sim.store(3, 3)
        assert_others_are_done(sim, job)


def assert_others_are_done(sim: SimulatedCache, failed: Job) -> None:
    results = sim.finish()
    assert [result.job_id for result in results if not result.ok] == [failed.id]
    assert len({result.job_id for result in results}) == len(results)
    assert sim.handler.poll() == []
    assert torch.equal(sim.block(3), sim.page(3))
    with pytest.raises(TransferError, match=f"{failed.direction} {failed.id} failed: "):
        sim.handler.synchronize(failed)
    sim.handler.synchronize()  # it has been reported


@simulated
def test_a_failed_copy_waits_for_what_was_submitted(driver: Driver) -> None:
    with SimulatedCache(driver, layers=2) as sim:
        first_layer = sim.block(2)[:64]
        driver.fail("cuMemcpyAsync", nth=2)
        sim.load(1, 2, layer_groups=2)
        assert not torch.equal(sim.block(2)[:64], first_layer)  # no copy comes after the result


@pytest.mark.parametrize("failing", [1, 3, 5])
@simulated
def test_only_the_failing_joined_job_fails(driver: Driver, failing: int) -> None:
    with SimulatedCache(driver) as sim:
        sim.fill("store")
        jobs = [sim.store(i, 6 - i) for i in range(1, 6)]  # neighbours would be one copy
        driver.fail("cuMemcpyBatchAsync")  # of all
        driver.fail("cuMemcpyAsync", nth=1 + failing)  # then one by one, from that of fill() on
        job = jobs[failing - 1]
        copy = "cuMemcpyAsync"
        jobs[-1].wait()
        results = sim.finish()
        assert [result.job_id for result in results if not result.ok] == [job.id]
        assert copy in failure(job)
        assert sim.is_right(without=[job])


# The device is lost

FINDERS: dict[str, Callable[[SimulatedCache, Job], object]] = {
    "poll": lambda sim, job: sim.handler.poll(),
    "wait": lambda sim, job: sim.handler.synchronize(),
    "done": lambda sim, job: job.query(),
    "wait on a stream": lambda sim, job: job.wait(),
    "cancel": lambda sim, job: sim.handler.cancel(job),
    "metrics": lambda sim, job: sim.handler.metrics(),
    "store": lambda sim, job: sim.store(5, 5, after=None),
    "load": lambda sim, job: sim.submit("expedited", [5], [5]),
    "close": lambda sim, job: sim.handler.close(),
}


def assert_lost(sim: SimulatedCache, jobs: list[Job], reported: object = None) -> None:
    """Nothing works any more, nothing hangs, and everything is told."""
    results = reported if isinstance(reported, list) else sim.handler.poll()
    numbers = [result.job_id for result in results]
    assert set(numbers) >= {job.id for job in jobs}
    assert len(numbers) == len(set(numbers))
    assert sim.handler.poll() == []
    for job in jobs:
        assert job.query()
        assert "the device is lost" in failure(job)
    for kind in CHANNELS:
        with pytest.raises(DeviceLostError, match=r"the device is lost: .*only a new process"):
            sim.submit(kind, [1], [1])
        with pytest.raises(DeviceLostError):  # before it looks at what it was given
            sim.submit(kind, None, [1])
        metrics = sim.metrics(kind)
        assert (metrics.queued, metrics.running) == (0, 0)
    with pytest.raises(DeviceLostError, match="the device is lost"):
        sim.handler.synchronize(jobs)
    jobs[-1].wait()  # poll() has said it
    assert not sim.handler.cancel(jobs[0])
    sim.handler.close()


@pytest.mark.parametrize("full", [False, True], ids=["few jobs", "full queues"])
@pytest.mark.parametrize("finder", FINDERS)
@simulated
def test_a_lost_device_ends_all_jobs(driver: Driver, finder: str, full: bool) -> None:
    with SimulatedCache(driver) as sim:
        before = threads()
        sim.held()
        jobs = [sim.submit(kind, [i], [i], after=None) for i, kind in enumerate(CHANNELS)]
        jobs.append(sim.load(0, 3))
        if full:
            jobs += [job for kind in CHANNELS for job in sim.fill(kind, 7, 7)]
            jobs += [sim.submit(kind, [8], [8]) for kind in CHANNELS]
        driver.lose(719)
        found = None
        with suppress(RuntimeError):  # one that says it, as all do from then on
            found = FINDERS[finder](sim, jobs[0])
        if finder == "close":
            assert len(sim.handler.poll()) == len(jobs)
            assert in_time(lambda: new_threads(before) == 0)
            return
        assert_lost(sim, jobs, found)
        assert in_time(lambda: new_threads(before) == 0)


@pytest.mark.parametrize("kind", CHANNELS)
@simulated
def test_a_job_that_finds_loss_raises(driver: Driver, kind: str) -> None:
    with SimulatedCache(driver) as sim:
        driver.lose(719, device=0)  # contexts answer, streams do not
        with pytest.raises(DeviceLostError):
            sim.submit(kind, [1], [1], after=None)


@simulated
def test_a_job_on_a_lost_device_is_last(driver: Driver) -> None:
    """No other job is on the device, whose end would tell that it is lost."""
    with SimulatedCache(driver) as sim:
        for nth in (1, 2):  # what the job is to start after, and whether the device still answers
            driver.fail("cuStreamQuery", nth=nth, code=719)
        assert "cuStreamQuery" in failure(sim.store(1, 1, after=None))
        with pytest.raises(DeviceLostError):
            sim.store(2, 2)


@pytest.mark.parametrize(
    "calls",
    [
        ["cuEventRecord", "cuStreamQuery"],
        ["cuMemcpyAsync", "cuStreamSynchronize"],
        ["cuMemcpyAsync", "cuStreamQuery"],
        ["cuEventCreate", "cuStreamQuery"],
    ],
    ids="-".join,
)
@simulated
def test_a_loss_during_enqueue_ends_all_jobs(driver: Driver, calls: list[str]) -> None:
    with SimulatedCache(driver) as sim:
        jobs = [sim.load(1, 1), sim.submit("expedited", [2], [2])]
        for name in calls:
            driver.fail(name, code=719)
        if calls[0] == "cuEventCreate":
            driver.lose(719)
            with pytest.raises(RuntimeError, match="the device is lost"):
                sim.store(3, 3)
        else:
            jobs.append(sim.store(3, 3))
            assert calls[0] in failure(jobs[-1])
        assert_lost(sim, jobs)


@simulated
def test_a_worker_that_finds_loss_ends_jobs(driver: Driver) -> None:
    with SimulatedCache(driver) as sim:
        sim.held()
        before = threads()
        jobs = [sim.store(1, 1, after=None), *sim.fill("store"), sim.load(0, 1)]
        workers = threads() - before
        driver.lose(719)
        # While something is queued they look for room for it.
        assert in_time(lambda: rest(workers))
        jobs[-1].wait()
        assert_lost(sim, jobs)


@simulated
def test_a_worker_without_context_ends_all_jobs(driver: Driver) -> None:
    with SimulatedCache(driver, blocks=512, pages=512) as sim:
        jobs = [sim.store(1, 1)]
        driver.fail("cuCtxPushCurrent", 2, code=719)  # the first is of the submission
        pushed = driver.calls("cuCtxPushCurrent")
        jobs.append(sim.submit("store", range(512), range(512)))
        assert in_time(lambda: driver.calls("cuCtxPushCurrent") >= pushed + 2)
        run_until(driver, jobs[1].query)
        assert "cuCtxPushCurrent" in failure(jobs[1])
        assert_lost(sim, jobs[1:])


@simulated
def test_whoever_waits_hears_of_the_loss(driver: Driver) -> None:
    with SimulatedCache(driver) as sim:
        sim.held()
        jobs = [sim.store(1, 2, after=None), *sim.fill("store")]
        told: list[str] = []

        def wait() -> None:
            try:
                sim.handler.synchronize(jobs[-1])
            except TransferError as error:
                told.append(str(error))

        waiting = threading.Thread(target=wait)
        waiting.start()
        let_threads_look(driver)
        assert waiting.is_alive()
        driver.lose()
        waiting.join(PATIENCE)
        assert len(told) == 1
        assert "the device is lost" in told[0]
        assert_lost(sim, jobs)


@simulated
def test_a_done_job_survives_loss(driver: Driver) -> None:
    with SimulatedCache(driver) as sim:
        job = sim.store(1, 1)
        assert states(sim.finish()) == ["done"]
        driver.lose(719)
        job.wait(Stream(OTHER))
        with pytest.raises(RuntimeError, match="the device is lost"):
            sim.store(2, 2)


@simulated
def test_a_refused_wait_can_be_tried_again(driver: Driver) -> None:
    with SimulatedCache(driver) as sim:
        job = sim.store(1, 1)
        driver.fail("cuStreamIsCapturing")
        with pytest.raises(RuntimeError, match="cuStreamIsCapturing"):
            job.wait(Stream(OTHER))
        job.wait(Stream(OTHER))
        assert "wait" in driver.pending()
        assert states(sim.finish()) == ["done"]


@simulated
def test_a_wait_survives_one_failed_look(driver: Driver) -> None:
    with SimulatedCache(driver) as sim:
        job = sim.store(1, 1)
        driver.fail("cuCtxPushCurrent", 2)  # the first is of who looks with the lock
        pushed = driver.calls("cuCtxPushCurrent")
        with pytest.raises(TimeoutError):
            sim.handler.synchronize(job, timeout=0.01)
        assert driver.calls("cuCtxPushCurrent") > pushed + 2
        assert states(sim.finish()) == ["done"]


# What a failure must not leave behind


@simulated
def test_events_of_a_lost_device_are_freed(driver: Driver) -> None:
    with SimulatedCache(driver) as sim:
        sim.store(1, 1)
        driver.lose()
        sim.handler.poll()
    assert driver.live("events") == 0
    assert sim.metrics("store").streams == 0


@simulated
def test_an_unreadable_time_fails_one_job(driver: Driver) -> None:
    with SimulatedCache(driver) as sim:
        job = sim.store(1, 1)
        driver.run()
        driver.fail("cuEventElapsedTime")
        assert job.query()
        assert "cuEventElapsedTime" in failure(job)
        after = sim.store(2, 2)
        driver.run()
        assert [result.state for result in sim.handler.poll()] == ["failed", "done"]
        assert after.result == after.result
        assert job.result == job.result


@simulated
def test_a_cancelled_job_stays_cancelled_after_loss(driver: Driver) -> None:
    driver.set_mode("manual")
    driver.set_stream(0, CURRENT)
    handler = OffloadHandler(*cache(driver))
    driver.hold(CURRENT)
    job = handler.store(gpu_block_ids=[0], page_ids=[0])
    assert handler.cancel(job)
    driver.lose()
    handler.close()
    assert [result.state for result in handler.poll()] == ["cancelled"]
