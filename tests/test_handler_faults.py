"""Single failures of the driver that a gate or the end of a job has to survive."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from stub import Driver, cache, stubbed
from stub.handles import Stream

if TYPE_CHECKING:
    from torch_kvswap.handler import OffloadHandler


def make(driver: Driver) -> OffloadHandler:
    """On a device that runs when it is told to; stream 42 is current."""
    from torch_kvswap.handler import OffloadHandler

    driver.set_mode("manual")
    driver.set_stream(0, 42)
    return OffloadHandler(*cache(driver))


def passes(driver: Driver) -> bool:
    """Whether the gate lets stream 42 through."""
    driver.run()
    return driver.cuda.is_done(stream=42)


@pytest.mark.parametrize(("call", "nth"), [("cuStreamWriteValue64", 2), ("cuStreamWaitEvent", 1)])
@stubbed
def test_a_gate_opens_although_the_driver_fails_to_open_it(driver, call, nth):
    handler = make(driver)
    gate = handler.gate()
    assert handler.cancel(handler.store([0], [0], after=()))
    driver.run()
    handler.finished()
    # The load fails from the start: its page is invalid. The gate has been closed by one write.
    driver.fail(call, nth)
    job = handler.load([0], [1], after=(), gate=gate)
    gate.wait()
    assert job.result is not None
    assert job.result.state == "failed"
    closed = passes(driver)
    handler.finished()  # tries again
    opens = passes(driver)
    driver.set_mode("immediate")
    driver.lose()  # else a handler whose stream stands still could not be closed
    handler.close()
    assert not closed
    assert opens


@stubbed
def test_a_gate_is_closed_on_the_current_stream_whatever_the_load_starts_behind(driver):
    handler = make(driver)
    gate = handler.gate()
    hold = driver.hold(43)
    handler.load([0], [0], after=Stream(43), gate=gate)
    gate.wait()  # on the current stream: 42
    passed = passes(driver)
    driver.release(hold)
    assert passes(driver)
    driver.set_mode("immediate")
    handler.close()
    assert not passed


@stubbed
def test_a_lost_device_leaves_no_events(driver):
    handler = make(driver)
    driver.hold(42)
    jobs = [handler.store([i], [i]) for i in range(4)]
    driver.lose()
    handler.close()
    assert [result.job_id for result in handler.finished()] == [job.id for job in jobs]
    assert (driver.live("streams"), driver.live("events")) == (0, 0)


@stubbed
def test_a_job_that_was_cancelled_is_reported_so_also_when_the_device_is_lost(driver):
    handler = make(driver)
    driver.hold(42)
    job = handler.store([0], [0])
    assert handler.cancel(job)
    driver.lose()
    handler.close()
    assert [result.state for result in handler.finished()] == ["cancelled"]
