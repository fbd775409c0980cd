"""Any driver call may fail: its job fails once, with a reason, and no other job does."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress

import pytest
import torch
from error_text import error_text
from patience import PATIENCE, in_time
from processes import in_child
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
from simulated_driver import Driver, simulated

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
def test_a_call_that_fails_makes_one_failed_job_and_the_rest_goes_on(
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
def test_a_call_that_fails_for_a_queued_job_fails_that_job_only(
    driver: Driver, function: str, nth: int
) -> None:
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
def test_when_a_copy_fails_what_was_given_to_the_driver_is_waited_for(driver: Driver) -> None:
    with SimulatedCache(driver, layers=2) as sim:
        first_layer = sim.block(2)[:64]
        driver.fail("cuMemcpyAsync", nth=2)
        sim.load(1, 2, layer_groups=2)
        assert not torch.equal(sim.block(2)[:64], first_layer)  # no copy comes after the result


@pytest.mark.parametrize("failing", [1, 3, 5])
@simulated
def test_of_joined_jobs_only_the_one_fails_whose_copy_fails(driver: Driver, failing: int) -> None:
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


# Gates


@pytest.mark.parametrize(
    "function",
    ["cuDeviceGetAttribute", "cuMemHostAlloc", "cuStreamCreateWithPriority", "cuEventCreate"],
)
@simulated
def test_a_gate_that_cannot_be_made_says_why(driver: Driver, function: str) -> None:
    with SimulatedCache(driver) as sim:
        driver.fail(function)
        with pytest.raises(RuntimeError, match=function):
            sim.handler.gate()
        sim.handler.gate().wait()
        driver.run()
        assert driver.cuda.is_done(stream=CURRENT)


@simulated
def test_a_gate_is_refused_in_a_forked_child(driver: Driver) -> None:
    with SimulatedCache(driver) as sim:
        gate = sim.handler.gate()
        assert in_child(lambda: "forked from it; make a handler" in error_text(gate.wait)) == 1


@simulated
def test_a_driver_that_cannot_wait_for_values_has_no_gates(driver: Driver) -> None:
    with SimulatedCache(driver) as sim:
        driver.set_attribute(122, 0)
        assert error_text(sim.handler.gate).replace("\n", " ") == (
            "RuntimeError: the streams of CUDA device 0 cannot wait for a word of memory, which a "
            "gate needs; let a stream wait for each job instead"
        )


@pytest.mark.parametrize("function", ["cuStreamWriteValue64", "cuEventRecord"])
@simulated
def test_a_gate_that_cannot_be_closed_stays_open_and_there_is_no_job(
    driver: Driver, function: str
) -> None:
    with SimulatedCache(driver, layers=2) as sim:
        gate = sim.handler.gate(2)
        driver.fail(function, nth=2 if function == "cuStreamWriteValue64" else 1)
        with pytest.raises(RuntimeError, match=function):
            sim.load(1, 2, gate=gate)
        assert sim.handler.poll() == []
        for part in (0, 1):
            gate.wait(part)
        driver.run()
        assert driver.cuda.is_done(stream=CURRENT)
        sim.load(1, 2, gate=gate)
        assert states(sim.finish()) == ["done"]
        assert sim.is_right()


@pytest.mark.parametrize(
    ("function", "nth"),
    [
        ("cuMemcpyAsync", 1),
        ("cuMemcpyAsync", 2),
        ("cuStreamWriteValue64", 3),  # the first two close it
        ("cuStreamWriteValue64", 4),
        ("cuStreamWaitEvent", 1),
        ("cuStreamWaitEvent", 3),
        ("cuEventRecord", 1 + 3 + 1),  # closed, the start and two ends, opened
    ],
)
@simulated
def test_the_gate_of_a_load_that_fails_opens(driver: Driver, function: str, nth: int) -> None:
    with SimulatedCache(driver, layers=2) as sim:
        gate = sim.handler.gate(2)
        driver.fail(function, nth)
        job = sim.load(1, 2, gate=gate)
        assert function in failure(job)
        for part in (0, 1):
            gate.wait(part)
        driver.run()
        assert driver.cuda.is_done(stream=CURRENT)
        assert states(sim.finish()) == ["failed"]
        sim.load(1, 2, gate=gate)
        gate.wait(1)
        assert states(sim.finish()) == ["done"]
        assert driver.cuda.is_done(stream=CURRENT)
        assert torch.equal(sim.page(1), sim.block(2))


@simulated
def test_a_gate_is_closed_again_only_behind_the_end_of_the_load_before(driver: Driver) -> None:
    with SimulatedCache(driver, layers=2) as sim:
        gate = sim.handler.gate(2)
        hold = sim.held(SIDE)
        # The first load fails on its way, and waits for what was enqueued without the lock.
        driver.fail("cuMemcpyAsync", 2)
        waits = driver.calls("cuStreamSynchronize")
        first = threading.Thread(target=lambda: sim.load(1, 2, after=Stream(SIDE), gate=gate))
        first.start()
        assert in_time(lambda: driver.calls("cuStreamSynchronize") > waits)
        asks = driver.calls("cuStreamIsCapturing")
        second = threading.Thread(target=lambda: sim.load(3, 4, gate=gate))
        second.start()
        assert in_time(lambda: driver.calls("cuStreamIsCapturing") > asks)
        assert in_time(lambda: rest({second.native_id or 0}))
        assert driver.calls("cuStreamWriteValue64") == 2  # closed by the first alone
        sim.release(hold)
        for thread in (first, second):
            thread.join(PATIENCE)
            assert not thread.is_alive()
        assert driver.calls("cuStreamWriteValue64") == 8
        assert sorted(states(sim.finish())) == ["done", "failed"]
        gate.wait(1)
        driver.run()
        assert driver.cuda.is_done(stream=CURRENT)
        assert torch.equal(sim.page(3), sim.block(4))


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
    "gate": lambda sim, job: sim.handler.gate(),
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
def test_a_lost_device_ends_all_jobs_whoever_finds_it_first(
    driver: Driver, finder: str, full: bool
) -> None:
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


@simulated
def test_a_job_that_cannot_start_on_a_lost_device_is_the_last_one(driver: Driver) -> None:
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
def test_a_device_that_is_lost_while_a_job_is_enqueued_ends_all_jobs(
    driver: Driver, calls: list[str]
) -> None:
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
def test_a_worker_that_finds_the_device_lost_ends_all_jobs(driver: Driver) -> None:
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
def test_a_worker_that_gets_no_context_ends_all_jobs(driver: Driver) -> None:
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
def test_whoever_waits_while_the_device_is_lost_is_told(driver: Driver) -> None:
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
def test_the_gate_of_a_load_that_finds_the_device_lost_is_open(driver: Driver) -> None:
    with SimulatedCache(driver) as sim:
        driver.set_mode("immediate")
        gate = sim.handler.gate()
        # The copy, the wait for what precedes it, and the opening of the gate by the driver.
        for name in ("cuMemcpyAsync", "cuStreamSynchronize", "cuStreamWaitEvent"):
            driver.fail(name, code=719)
        job = sim.load(1, 1, gate=gate)
        gate.wait()
        assert driver.cuda.is_done(stream=CURRENT)
        assert_lost(sim, [job])


@simulated
def test_a_job_that_is_done_can_be_waited_for_when_the_device_is_lost(driver: Driver) -> None:
    with SimulatedCache(driver) as sim:
        job = sim.store(1, 1)
        assert states(sim.finish()) == ["done"]
        driver.lose(719)
        job.wait(Stream(OTHER))
        with pytest.raises(RuntimeError, match="the device is lost"):
            sim.store(2, 2)


@simulated
def test_a_wait_for_a_job_that_the_driver_refuses_raises_and_can_be_tried_again(
    driver: Driver,
) -> None:
    with SimulatedCache(driver) as sim:
        job = sim.store(1, 1)
        driver.fail("cuStreamIsCapturing")
        with pytest.raises(RuntimeError, match="cuStreamIsCapturing"):
            job.wait(Stream(OTHER))
        job.wait(Stream(OTHER))
        assert "wait" in driver.pending()
        assert states(sim.finish()) == ["done"]


@simulated
def test_who_waits_for_a_job_goes_on_when_one_look_at_it_fails(driver: Driver) -> None:
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
def test_gates_that_are_gone_leave_no_streams_and_no_events(driver: Driver) -> None:
    with SimulatedCache(driver, layers=2) as sim:
        before = driver.live("streams"), driver.live("events")
        for _ in range(20):
            gate = sim.handler.gate(2)
            del gate
        assert (driver.live("streams"), driver.live("events")) == (before[0] + 1, before[1] + 2)
        assert driver.calls("cuMemHostAlloc") == 1  # their words share memory, which stays
        for gate_first in (True, False):
            other = OffloadHandler(sim.layout, sim.host)
            orphan = other.gate(2)
            if gate_first:
                del orphan
            other.close()
            del other
            if not gate_first:
                orphan.wait(1)
                del orphan
            assert (driver.live("streams"), driver.live("events")) == (before[0] + 1, before[1] + 2)


@simulated
def test_a_gate_that_is_gone_opens_behind_its_load_and_lets_graphs_pass(driver: Driver) -> None:
    with SimulatedCache(driver, layers=2) as sim:
        gate = sim.handler.gate(2)
        driver.set_capturing(True, SIDE)
        for part in (0, 1):
            gate.wait(part, Stream(SIDE))
        driver.set_capturing(False, SIDE)
        hold = sim.held(45)
        sim.load(1, 2, after=Stream(45), gate=gate)
        driver.run()  # the gate is closed
        del gate
        sim.handler.gate(2)  # takes no words that a graph waits for
        driver.replay(SIDE, OTHER)
        driver.run()
        assert not driver.cuda.is_done(stream=OTHER)
        sim.release(hold)
        assert states(sim.finish()) == ["done"]
        for _ in range(2):
            assert driver.cuda.is_done(stream=OTHER)
            driver.replay(SIDE, OTHER)
            driver.run()


@simulated
def test_the_events_of_a_lost_device_are_let_go(driver: Driver) -> None:
    with SimulatedCache(driver) as sim:
        sim.store(1, 1)
        driver.lose()
        sim.handler.poll()
    assert driver.live("events") == 0
    assert sim.metrics("store").streams == 0


@simulated
def test_a_time_that_cannot_be_read_fails_one_job_and_loses_no_device(driver: Driver) -> None:
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
