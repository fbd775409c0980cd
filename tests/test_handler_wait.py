"""How a thread waits on the host: nobody else is held up, and the thread stays as it was."""

from __future__ import annotations

import ctypes
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from refusal import refusal
from sim import Rig, run_until, states
from stub import Driver, stubbed

PR_GET_TIMERSLACK = 30


@stubbed
def test_a_wait_leaves_the_precision_of_the_threads_sleeps_as_it_was(driver: Driver) -> None:
    prctl = ctypes.CDLL(None).prctl
    with Rig(driver) as rig:
        before = prctl(PR_GET_TIMERSLACK)
        _, job = rig.hold_up("store")
        assert "TimeoutError" in refusal(rig.handler.wait, job, timeout=0.02)  # it slept by then
        assert prctl(PR_GET_TIMERSLACK) == before


@stubbed
def test_others_submit_while_a_thread_waits(driver: Driver) -> None:
    with Rig(driver) as rig, ThreadPoolExecutor(1) as threads:
        hold, held = rig.hold_up("store", 1, 1)
        waiting = threads.submit(rig.handler.wait, held)
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
    with Rig(driver) as rig, ThreadPoolExecutor(3) as threads:
        hold, job = rig.hold_up("store", 1, 1)
        waiting = [
            threads.submit(rig.handler.wait, job if waits_for == "the job" else None)
            for _ in range(2)
        ]
        closing = threads.submit(rig.handler.close)
        time.sleep(0.005)
        assert not any(call.done() for call in [*waiting, closing])
        rig.release(hold)
        assert run_until(driver, lambda: all(call.done() for call in [*waiting, closing]))
        assert [call.result() for call in [*waiting, closing]] == [None] * 3
        assert states(rig.handler.finished()) == ["done"]
    assert driver.live("events") == driver.live("streams") == 0


@stubbed
def test_a_thread_that_waits_hears_that_the_device_is_lost(driver: Driver) -> None:
    with Rig(driver) as rig, ThreadPoolExecutor(1) as threads:
        _, job = rig.hold_up("store", 1, 1)
        waiting = threads.submit(refusal, rig.handler.wait, job)
        time.sleep(0.002)
        driver.lose()
        assert "the device is lost" in waiting.result(timeout=10)


@stubbed
def test_a_thread_waits_for_a_job_that_is_still_queued(driver: Driver) -> None:
    with Rig(driver) as rig, ThreadPoolExecutor(1) as threads:
        queued = rig.fill("store", 1, 1)[-1]
        waiting = threads.submit(rig.handler.wait, queued)
        time.sleep(0.002)
        assert not waiting.done()
        assert run_until(driver, waiting.done)
        assert waiting.result() is None
        assert queued.result is not None
        assert queued.result.ok
