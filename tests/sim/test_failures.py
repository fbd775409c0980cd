"""Whatever call of the driver fails: the job it was for fails, once, with a reason, and no other."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress

import pytest
import torch
from patience import PATIENCE
from refusal import refusal
from rigs import in_time
from sim import (
    CHANNELS,
    CURRENT,
    SIDE,
    Rig,
    Stream,
    let_threads_look,
    number_of_threads,
    rest,
    run_until,
    states,
    threads,
)
from simulated_driver import Driver, stubbed

from torch_kvswap.handler import Job, OffloadHandler, TransferError

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
@stubbed
def test_a_call_that_fails_makes_one_failed_job_and_the_rest_goes_on(
    driver: Driver, behind: str, function: str, nth: int
) -> None:
    live = driver.live("events"), driver.live("streams")
    kind = "load" if behind == "layer groups" else "store"
    options = {"layer_groups": 2} if behind == "layer groups" else {}
    with Rig(driver, layers=2 if behind in ("layer groups", "several fragments") else 1) as rig:
        event = rig.event(SIDE)  # which happens when the stub is asked to run or to synchronise
        options["after"] = {"stream": Stream(SIDE), "event": event}.get(behind, ())
        rig.load(2 if behind == "another channel" else 1, 9)
        driver.fail(function, nth)
        job = rig.submit(kind, [2], [2], **options)
        assert job.done()
        assert function in failure(job)
        rig.submit(kind, [3], [3], **options)
        assert_others_are_done(rig, job)
        rig.handler.close()
        driver.cuda.destroy_event(event.cuda_event)
    assert (driver.live("events"), driver.live("streams")) == live


@pytest.mark.parametrize(
    ("function", "nth"),  # behind the calls of the submission, and of the job in front of it
    [("cuStreamWaitEvent", 1), ("cuEventRecord", 4), ("cuMemcpyAsync", 2), ("cuEventRecord", 5)],
)
@stubbed
def test_a_call_that_fails_for_a_queued_job_fails_that_job_only(
    driver: Driver, function: str, nth: int
) -> None:
    with Rig(driver) as rig:
        rig.fill("store")
        rig.event(SIDE)
        driver.fail(function, nth)
        job = rig.store(2, 2, after=Stream(SIDE))
        with pytest.raises(TransferError, match=function):
            job.wait_on(Stream(OTHER))  # what is joined is tried again, each job by itself
        rig.store(3, 3)
        assert_others_are_done(rig, job)


def assert_others_are_done(rig: Rig, failed: Job) -> None:
    results = rig.finish()
    assert [result.job_id for result in results if not result.ok] == [failed.id]
    assert len({result.job_id for result in results}) == len(results)
    assert rig.handler.finished() == []
    assert torch.equal(rig.block(3), rig.page(3))
    with pytest.raises(TransferError, match=f"{failed.direction} {failed.id} failed: "):
        rig.handler.wait(failed)
    rig.handler.wait()  # it has been reported


@stubbed
def test_no_stream_waits_for_a_failed_job(driver: Driver) -> None:
    with Rig(driver) as rig:
        driver.fail("cuMemcpyAsync")
        job = rig.load(1, 2)
        rig.start_log()
        with pytest.raises(TransferError, match=r"load 0 failed: .*cuMemcpyAsync") as raised:
            job.wait_on(Stream(SIDE))
        assert [result.job_id for result in raised.value.results] == [job.id]
        assert rig.log() == ""


@stubbed
def test_when_a_copy_fails_what_was_given_to_the_driver_is_waited_for(driver: Driver) -> None:
    with Rig(driver, layers=2) as rig:
        first_layer = rig.block(2)[:64]
        driver.fail("cuMemcpyAsync", nth=2)
        rig.load(1, 2, layer_groups=2)
        assert not torch.equal(rig.block(2)[:64], first_layer)  # no copy comes after the result


@pytest.mark.parametrize("failing", [1, 3, 5])
@stubbed
def test_of_joined_jobs_only_the_one_fails_whose_copy_fails(driver: Driver, failing: int) -> None:
    with Rig(driver) as rig:
        rig.fill("store")
        jobs = [rig.store(i, 6 - i) for i in range(1, 6)]  # neighbours would be one copy
        driver.fail("cuMemcpyBatchAsync")  # of all
        driver.fail("cuMemcpyAsync", nth=1 + failing)  # then one by one, from that of fill() on
        job = jobs[failing - 1]
        if failing == 5:
            with pytest.raises(TransferError, match="cuMemcpyAsync"):
                job.wait_on()
        else:
            jobs[-1].wait_on()
        results = rig.finish()
        assert [result.job_id for result in results if not result.ok] == [job.id]
        assert "cuMemcpyAsync" in failure(job)
        assert rig.is_right(without=[job])


@pytest.mark.parametrize("nth", range(1, 7))
@stubbed
def test_a_handler_that_gets_too_few_streams_is_not_made(driver: Driver, nth: int) -> None:
    with Rig(driver) as rig:
        driver.fail("cuStreamCreateWithPriority", nth)
        with pytest.raises(RuntimeError, match="cuStreamCreateWithPriority"):
            OffloadHandler(rig.layout, rig.host)
        OffloadHandler(rig.layout, rig.host).close()


# Gates


@pytest.mark.parametrize(
    "function",
    ["cuDeviceGetAttribute", "cuMemHostAlloc", "cuStreamCreateWithPriority", "cuEventCreate"],
)
@stubbed
def test_a_gate_that_cannot_be_made_says_why(driver: Driver, function: str) -> None:
    with Rig(driver) as rig:
        driver.fail(function)
        with pytest.raises(RuntimeError, match=function):
            rig.handler.gate()
        rig.handler.gate().wait()
        driver.run()
        assert driver.cuda.is_done(stream=CURRENT)


@stubbed
def test_a_driver_that_cannot_wait_for_values_has_no_gates(driver: Driver) -> None:
    with Rig(driver) as rig:
        driver.set_attribute(122, 0)
        assert refusal(rig.handler.gate).replace("\n", " ") == (
            "RuntimeError: the driver of CUDA device 0 has no 64-bit stream memory operations, "
            "which a gate is made of; wait for each job with wait_on() or wait_layer() instead"
        )


@pytest.mark.parametrize("function", ["cuStreamWriteValue64", "cuEventRecord"])
@stubbed
def test_a_gate_that_cannot_be_closed_stays_open_and_there_is_no_job(
    driver: Driver, function: str
) -> None:
    with Rig(driver, layers=2) as rig:
        gate = rig.handler.gate(2)
        driver.fail(function, nth=2 if function == "cuStreamWriteValue64" else 1)
        with pytest.raises(RuntimeError, match=function):
            rig.load(1, 2, gate=gate)
        assert rig.handler.finished() == []
        for part in (0, 1):
            gate.wait(part)
        driver.run()
        assert driver.cuda.is_done(stream=CURRENT)
        rig.load(1, 2, gate=gate)
        assert states(rig.finish()) == ["done"]
        assert rig.is_right()


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
@stubbed
def test_the_gate_of_a_load_that_fails_opens(driver: Driver, function: str, nth: int) -> None:
    with Rig(driver, layers=2) as rig:
        gate = rig.handler.gate(2)
        driver.fail(function, nth)
        job = rig.load(1, 2, gate=gate)
        assert function in failure(job)
        for part in (0, 1):
            gate.wait(part)
        driver.run()
        assert driver.cuda.is_done(stream=CURRENT)
        assert states(rig.finish()) == ["failed"]
        rig.load(1, 2, gate=gate)
        gate.wait(1)
        assert states(rig.finish()) == ["done"]
        assert driver.cuda.is_done(stream=CURRENT)
        assert torch.equal(rig.page(1), rig.block(2))


@stubbed
def test_a_gate_is_closed_again_only_behind_the_end_of_the_load_before(driver: Driver) -> None:
    with Rig(driver, layers=2) as rig:
        gate = rig.handler.gate(2)
        hold = rig.held(SIDE)
        # The first load fails on its way, and waits for what was enqueued without the lock.
        driver.fail("cuMemcpyAsync", 2)
        waits = driver.calls("cuStreamSynchronize")
        first = threading.Thread(target=lambda: rig.load(1, 2, after=Stream(SIDE), gate=gate))
        first.start()
        assert in_time(lambda: driver.calls("cuStreamSynchronize") > waits)
        asks = driver.calls("cuStreamIsCapturing")
        second = threading.Thread(target=lambda: rig.load(3, 4, gate=gate))
        second.start()
        assert in_time(lambda: driver.calls("cuStreamIsCapturing") > asks)
        assert in_time(lambda: rest({second.native_id or 0}))
        assert driver.calls("cuStreamWriteValue64") == 2  # closed by the first alone
        rig.release(hold)
        for thread in (first, second):
            thread.join(PATIENCE)
            assert not thread.is_alive()
        assert driver.calls("cuStreamWriteValue64") == 8
        assert sorted(states(rig.finish())) == ["done", "failed"]
        gate.wait(1)
        driver.run()
        assert driver.cuda.is_done(stream=CURRENT)
        assert torch.equal(rig.page(3), rig.block(4))


# The device is lost

FINDERS: dict[str, Callable[[Rig, Job], object]] = {
    "finished": lambda rig, job: rig.handler.finished(),
    "wait": lambda rig, job: rig.handler.wait(),
    "drain": lambda rig, job: rig.handler.drain(),
    "done": lambda rig, job: job.done(),
    "wait_on": lambda rig, job: job.wait_on(),
    "cancel": lambda rig, job: rig.handler.cancel(job),
    "metrics": lambda rig, job: rig.handler.metrics(),
    "store": lambda rig, job: rig.store(5, 5, after=None),
    "load": lambda rig, job: rig.submit("expedited", [5], [5]),
    "gate": lambda rig, job: rig.handler.gate(),
    "close": lambda rig, job: rig.handler.close(),
}


def assert_lost(rig: Rig, jobs: list[Job], reported: object = None) -> None:
    """Nothing works any more, nothing hangs, and everything is told."""
    results = reported if isinstance(reported, list) else rig.handler.finished()
    numbers = [result.job_id for result in results]
    assert set(numbers) >= {job.id for job in jobs}
    assert len(numbers) == len(set(numbers))
    assert rig.handler.finished() == []
    for job in jobs:
        assert job.done()
        assert "the device is lost" in failure(job)
    for kind in CHANNELS:
        with pytest.raises(RuntimeError, match=r"the device is lost: .*only a new process"):
            rig.submit(kind, [1], [1])
        metrics = rig.metrics(kind)
        assert (metrics.queued, metrics.running) == (0, 0)
    with pytest.raises(TransferError, match="the device is lost"):
        rig.handler.wait(jobs)
    with pytest.raises(TransferError, match="the device is lost"):
        jobs[-1].wait_on()
    assert not rig.handler.cancel(jobs[0])
    rig.handler.close()


@pytest.mark.parametrize("full", [False, True], ids=["few jobs", "full queues"])
@pytest.mark.parametrize("finder", FINDERS)
@stubbed
def test_a_lost_device_ends_all_jobs_whoever_finds_it_first(
    driver: Driver, finder: str, full: bool
) -> None:
    with Rig(driver) as rig:
        threads = number_of_threads()
        rig.held()
        jobs = [rig.submit(kind, [i], [i], after=None) for i, kind in enumerate(CHANNELS)]
        jobs.append(rig.load(0, 3))
        if full:
            jobs += [job for kind in CHANNELS for job in rig.fill(kind, 7, 7)]
            jobs += [rig.submit(kind, [8], [8]) for kind in CHANNELS]
        driver.lose(719)
        found = None
        with suppress(RuntimeError):  # one that says it, as all do from then on
            found = FINDERS[finder](rig, jobs[0])
        if finder == "close":
            assert len(rig.handler.finished()) == len(jobs)
            assert number_of_threads() == threads
            return
        assert_lost(rig, jobs, found)
        assert number_of_threads() == threads


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
@stubbed
def test_a_device_that_is_lost_while_a_job_is_enqueued_ends_all_jobs(
    driver: Driver, calls: list[str]
) -> None:
    with Rig(driver) as rig:
        jobs = [rig.load(1, 1), rig.submit("expedited", [2], [2])]
        for name in calls:
            driver.fail(name, code=719)
        if calls[0] == "cuEventCreate":
            driver.lose(719)
            with pytest.raises(RuntimeError, match="the device is lost"):
                rig.store(3, 3)
        else:
            jobs.append(rig.store(3, 3))
            assert calls[0] in failure(jobs[-1])
        assert_lost(rig, jobs)


@stubbed
def test_a_worker_that_finds_the_device_lost_ends_all_jobs(driver: Driver) -> None:
    with Rig(driver) as rig:
        rig.held()
        before = threads()
        jobs = [rig.store(1, 1, after=None), *rig.fill("store"), rig.load(0, 1)]
        workers = threads() - before
        driver.lose(719)
        # While something is queued they look for room for it.
        assert in_time(lambda: rest(workers))
        with pytest.raises(TransferError, match="the device is lost"):
            jobs[-1].wait_on()
        assert_lost(rig, jobs)


@stubbed
def test_a_worker_that_gets_no_context_ends_all_jobs(driver: Driver) -> None:
    with Rig(driver, blocks=512, pages=512) as rig:
        jobs = [rig.store(1, 1)]
        for nth in (
            2,
            3,
        ):  # the first is of the submission, then those of the worker and this thread
            driver.fail("cuCtxPushCurrent", nth, code=719)
        pushed = driver.calls("cuCtxPushCurrent")
        jobs.append(rig.submit("store", range(512), range(512)))
        assert in_time(lambda: driver.calls("cuCtxPushCurrent") >= pushed + 2)
        run_until(driver, jobs[1].done)
        assert "cuCtxPushCurrent" in failure(jobs[1])
        assert_lost(rig, jobs[1:])


@stubbed
def test_whoever_waits_while_the_device_is_lost_is_told(driver: Driver) -> None:
    with Rig(driver) as rig:
        rig.held()
        jobs = [rig.store(1, 2, after=None), *rig.fill("store")]
        told: list[str] = []

        def wait() -> None:
            try:
                rig.handler.wait(jobs[-1])
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
        assert_lost(rig, jobs)


# What a failure must not leave behind


@pytest.mark.parametrize("nth", range(1, 7))
@stubbed
def test_a_handler_that_is_not_made_leaves_no_streams(driver: Driver, nth: int) -> None:
    with Rig(driver) as rig:
        before = driver.live("streams")
        driver.fail("cuStreamCreateWithPriority", nth)
        with pytest.raises(RuntimeError, match="cuStreamCreateWithPriority"):
            OffloadHandler(rig.layout, rig.host)
        assert driver.live("streams") == before


@stubbed
def test_a_gate_that_is_not_made_leaves_no_stream_and_no_event(driver: Driver) -> None:
    with Rig(driver) as rig:
        before = driver.live("streams"), driver.live("events")
        driver.fail("cuEventCreate", 2)
        with pytest.raises(RuntimeError, match="cuEventCreate"):
            rig.handler.gate()
        assert (driver.live("streams"), driver.live("events")) == before


@stubbed
def test_gates_that_are_gone_leave_no_streams_and_no_events(driver: Driver) -> None:
    with Rig(driver, layers=2) as rig:
        before = driver.live("streams"), driver.live("events")
        for _ in range(20):
            gate = rig.handler.gate(2)
            del gate
        assert (driver.live("streams"), driver.live("events")) == (before[0] + 1, before[1] + 2)
        assert driver.calls("cuMemHostAlloc") == 1  # their words share memory, which stays
        for gate_first in (True, False):
            other = OffloadHandler(rig.layout, rig.host)
            orphan = other.gate(2)
            if gate_first:
                del orphan
            other.close()
            del other
            if not gate_first:
                orphan.wait(1)
                del orphan
            assert (driver.live("streams"), driver.live("events")) == (before[0] + 1, before[1] + 2)


@stubbed
def test_a_gate_that_is_gone_opens_behind_its_load_and_lets_graphs_pass(driver: Driver) -> None:
    with Rig(driver, layers=2) as rig:
        gate = rig.handler.gate(2)
        driver.set_capturing(True, SIDE)
        for part in (0, 1):
            gate.wait(part, Stream(SIDE))
        driver.set_capturing(False, SIDE)
        hold = rig.held(45)
        rig.load(1, 2, after=Stream(45), gate=gate)
        driver.run()  # the gate is closed
        del gate
        rig.handler.gate(2)  # takes no words that a graph waits for
        driver.replay(SIDE, OTHER)
        driver.run()
        assert not driver.cuda.is_done(stream=OTHER)
        rig.release(hold)
        assert states(rig.finish()) == ["done"]
        for _ in range(2):
            assert driver.cuda.is_done(stream=OTHER)
            driver.replay(SIDE, OTHER)
            driver.run()


@stubbed
def test_the_events_of_a_lost_device_are_let_go(driver: Driver) -> None:
    with Rig(driver) as rig:
        rig.store(1, 1)
        driver.lose()
        rig.handler.finished()
    assert driver.live("events") == 0
    assert rig.metrics("store").streams == 0


@stubbed
def test_a_time_that_cannot_be_read_fails_one_job_and_loses_no_device(driver: Driver) -> None:
    with Rig(driver) as rig:
        job = rig.store(1, 1)
        driver.run()
        driver.fail("cuEventElapsedTime")
        assert job.done()
        assert "cuEventElapsedTime" in failure(job)
        after = rig.store(2, 2)
        driver.run()
        assert [result.state for result in rig.handler.finished()] == ["failed", "done"]
        assert after.result == after.result
        assert job.result == job.result
