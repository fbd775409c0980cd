"""How a thread waits on the host: nobody else is held up, and the thread stays as it was."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from patience import PATIENCE
from refusal import refusal
from rigs import in_time
from sim import CHANNELS, SIDE, Rig, Stream, let_threads_look, rest, run_until, states, threads
from stub import Driver, stubbed

from torch_kvswap.handler import Job

PR_GET_TIMERSLACK = 30
LARGE, TOO_LARGE = (
    1024,
    20000,
)  # blocks that one call does not enqueue; nor the driver's queue holds
COPY = "cuMemcpyBatchAsync"


@stubbed
def test_a_wait_leaves_the_precision_of_the_threads_sleeps_as_it_was(driver: Driver) -> None:
    prctl = ctypes.CDLL(None).prctl
    with Rig(driver) as rig:
        before = prctl(PR_GET_TIMERSLACK)
        _, job = rig.hold_up("store")
        # It sleeps from the first millisecond on.
        assert "TimeoutError" in refusal(rig.handler.wait, job, timeout=0.02)
        assert prctl(PR_GET_TIMERSLACK) == before


@stubbed
def test_others_submit_while_a_thread_waits(driver: Driver) -> None:
    with Rig(driver) as rig, ThreadPoolExecutor(1) as pool:
        hold, held = rig.hold_up("store", 1, 1)
        waiting = pool.submit(rig.handler.wait, held)
        for _ in range(50):
            assert not waiting.done()
            load = rig.load(2, 2)
            assert run_until(driver, load.done)
        rig.release(hold)
        assert run_until(driver, waiting.done)
        assert waiting.result() is None
        assert len(rig.handler.finished()) == 51


@pytest.mark.parametrize("waits_for", ["the job", "all jobs"])
@stubbed
def test_a_handler_closes_while_threads_wait(driver: Driver, waits_for: str) -> None:
    with Rig(driver) as rig, ThreadPoolExecutor(3) as pool:
        hold, job = rig.hold_up("store", 1, 1)
        waiting = [
            pool.submit(rig.handler.wait, job if waits_for == "the job" else None) for _ in range(2)
        ]
        closing = pool.submit(rig.handler.close)
        let_threads_look(driver)
        assert not any(call.done() for call in [*waiting, closing])
        rig.release(hold)
        assert run_until(driver, lambda: all(call.done() for call in [*waiting, closing]))
        assert [call.result() for call in [*waiting, closing]] == [None] * 3
        assert states(rig.handler.finished()) == ["done"]
    assert driver.live("events") == driver.live("streams") == 0


@stubbed
def test_a_thread_that_waits_hears_that_the_device_is_lost(driver: Driver) -> None:
    with Rig(driver) as rig, ThreadPoolExecutor(1) as pool:
        _, job = rig.hold_up("store", 1, 1)
        waiting = pool.submit(refusal, rig.handler.wait, job)
        let_threads_look(driver)
        driver.lose()
        assert "the device is lost" in waiting.result(timeout=PATIENCE)


@stubbed
def test_a_thread_waits_for_a_job_that_is_still_queued(driver: Driver) -> None:
    with Rig(driver) as rig, ThreadPoolExecutor(1) as pool:
        queued = rig.fill("store", 1, 1)[-1]
        waiting = pool.submit(rig.handler.wait, queued)
        let_threads_look(driver)
        assert not waiting.done()
        assert run_until(driver, waiting.done)
        assert waiting.result() is None
        assert queued.result is not None
        assert queued.result.ok


# What was begun: the worker's part of a job that is too large for the call that submits it


@contextmanager
def late_worker(rig: Rig, kind: str) -> Iterator[None]:
    """The worker of the channel sleeps on while there is something for it."""
    before = threads()
    begin(rig, kind)
    rig.finish()
    (worker,) = threads() - before
    assert in_time(lambda: rest({worker}))
    with rig.driver.stopped(worker):
        yield
    rig.finish()


def begin(rig: Rig, kind: str) -> tuple[Job, Callable[[], int]]:
    """A large job, of all blocks but the last, and how many of its copies this thread has enqueued
    since."""
    count = len(rig.tensors[0]) - 1
    job = rig.submit(kind, range(count), range(count)[::-1])
    before = rig.driver.calls_here(COPY)
    return job, lambda: rig.driver.calls_here(COPY) - before


@contextmanager
def device_that_runs_what_is_complete(rig: Rig, job: Job) -> Iterator[None]:
    """A thread of the test runs the device as soon as all copies of the job have been enqueued."""
    copies = rig.driver.calls(COPY)

    def run() -> None:
        assert in_time(lambda: rig.driver.calls(COPY) > copies)
        run_until(rig.driver, job.done)

    thread = threading.Thread(target=run)
    thread.start()
    yield
    thread.join()


@pytest.mark.parametrize("how", ["host", "stream", "host, for another job"])
@pytest.mark.parametrize("kind", CHANNELS)
@stubbed
def test_who_waits_enqueues_what_was_begun_before_the_worker_wakes_up(
    driver: Driver, kind: str, how: str
) -> None:
    with Rig(driver, blocks=LARGE, pages=LARGE) as rig, late_worker(rig, kind):
        pages = rig.host.pages
        other = rig.submit("store" if kind == "load" else "load", [1], [1])
        job, enqueued = begin(rig, kind)
        if how == "stream":
            job.wait_on(Stream(SIDE))
        else:
            with device_that_runs_what_is_complete(rig, job):
                rig.handler.wait(job if how == "host" else other, timeout=PATIENCE)
        assert enqueued() == 1
    assert rig.is_right(pages=pages)


@stubbed
def test_a_wait_does_not_begin_what_would_take_longer_than_its_time(driver: Driver) -> None:
    with Rig(driver, blocks=LARGE, pages=LARGE) as rig, late_worker(rig, "store"):
        job, enqueued = begin(rig, "store")
        for _ in range(20):  # some end before it has looked, on a busy machine
            with pytest.raises(TimeoutError):
                rig.handler.wait(job, timeout=0.0005)
        assert enqueued() == 0


@pytest.mark.parametrize("how", ["host", "stream"])
@stubbed
def test_who_waits_enqueues_nothing_that_the_driver_may_hold_it_up_for(
    driver: Driver, how: str
) -> None:
    with Rig(driver, blocks=TOO_LARGE, pages=TOO_LARGE) as rig, late_worker(rig, "store"):
        _, enqueued = begin(rig, "store")
        if how == "stream":
            rig.fill("expedited", TOO_LARGE - 1, TOO_LARGE - 1)[-1].wait_on(Stream(SIDE))
        else:
            with pytest.raises(TimeoutError):
                rig.handler.wait(timeout=0.09)  # four times what it would take
        assert enqueued() == 0


@pytest.mark.parametrize("kind", CHANNELS)
@stubbed
def test_who_waits_for_what_was_begun_hears_that_the_device_is_lost(
    driver: Driver, kind: str
) -> None:
    with Rig(driver, blocks=LARGE, pages=LARGE) as rig, late_worker(rig, kind):
        job, enqueued = begin(rig, kind)
        driver.lose()
        assert "TransferError" in refusal(rig.handler.wait, job)
        assert enqueued() == 0
        assert job.result is not None
        assert "the device is lost" in str(job.result.error)


@stubbed
def test_a_wait_that_enqueues_spoils_no_graph_that_another_thread_captures(driver: Driver) -> None:
    with Rig(driver, blocks=LARGE, pages=LARGE) as rig, late_worker(rig, "store"):
        job, enqueued = begin(rig, "store")
        driver.set_global_capture(True)
        with device_that_runs_what_is_complete(rig, job):
            rig.handler.wait(job, timeout=PATIENCE)
        driver.set_global_capture(False)
        assert enqueued() == 1
        assert driver.capture_spoilt == 0


@stubbed
def test_ctrl_c_interrupts_a_close_that_waits_and_another_one_ends(driver: Driver) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with Rig(driver) as rig:
        hold, held = rig.hold_up("store", 1, 1)

        def interrupt() -> None:
            while "is closed" not in refusal(rig.handler.store, [1], [99]):
                time.sleep(0.001)
            os.kill(os.getpid(), signal.SIGINT)

        interrupting = threading.Thread(target=interrupt)
        interrupting.start()
        with pytest.raises(KeyboardInterrupt):
            rig.handler.close()
        interrupting.join()
        assert not held.done()
        assert "is closed" in refusal(rig.handler.store, [1], [1])
        rig.release(hold)
        driver.set_mode("immediate")
        rig.handler.close()
        assert states(rig.handler.finished()) == ["done"]
        assert (driver.live("streams"), driver.live("events")) == (0, 0)
    signal.signal(signal.SIGINT, before)
