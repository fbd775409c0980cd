"""Single driver failures in gates and at the ends of jobs."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from patience import PATIENCE, in_time
from simulated_cache import rest, threads
from simulated_driver import Driver, cache, simulated
from simulated_driver.handles import Stream

from torch_kvswap.offload.gate import Gate
from torch_kvswap.offload.handler import Job, OffloadHandler


def make(driver: Driver) -> OffloadHandler:
    """On a device that runs when it is told to; stream 42 is current."""
    driver.set_mode("manual")
    driver.set_stream(0, 42)
    return OffloadHandler(*cache(driver))


def passes(driver: Driver) -> bool:
    """Whether the gate lets stream 42 through."""
    driver.run()
    return driver.cuda.is_done(stream=42)


def leave_closed(driver: Driver, handler: OffloadHandler, gate: Gate, call: str, nth: int) -> None:
    """A load fails after it has closed the gate, and so does the nth such call of the driver."""
    driver.fail_copy(0)
    driver.fail(call, nth)
    job = handler.load(page_ids=[0], gpu_block_ids=[1], after=(), gate=gate)
    assert job.result is not None
    assert job.result.state == "failed"
    gate.wait()
    assert not passes(driver)


def in_thread(body: Callable[[], object]) -> object:
    """What the body returns or raises. Fails when that takes long."""
    told: list[object] = []

    def run() -> None:
        try:
            told.append(body())
        except RuntimeError as error:
            told.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert told, "this hangs"
    return told[0]


# The gate has been closed by one write, without a wait.
OPENINGS = [("cuStreamWriteValue64", 2), ("cuStreamWaitEvent", 1)]


@pytest.mark.parametrize(("call", "nth"), OPENINGS)
@simulated
def test_a_gate_opens_although_the_driver_fails_to_open_it(driver, call, nth):
    handler = make(driver)
    leave_closed(driver, handler, handler.gate(), call, nth)
    handler.poll()  # tries again
    opens = passes(driver)
    driver.set_mode("immediate")
    driver.lose()  # else a handler whose stream stands still could not be closed
    handler.close()
    assert opens


@pytest.mark.parametrize(("call", "nth"), OPENINGS)
@simulated
def test_the_next_load_opens_a_gate_that_the_driver_did_not_open(driver, call, nth):
    handler = make(driver)
    gate = handler.gate()
    leave_closed(driver, handler, gate, call, nth)
    job = in_thread(lambda: handler.load(page_ids=[0], gpu_block_ids=[1], gate=gate))
    assert isinstance(job, Job)
    gate.wait()
    assert passes(driver)
    assert torch.equal(handler.layouts[0].tensors[0][1], handler.pools[0].pages[0, 0, :64])
    assert [result.state for result in handler.poll()] == ["failed", "done"]
    driver.set_mode("immediate")
    handler.close()


@simulated
def test_a_load_is_refused_while_the_driver_does_not_open_its_gate(driver):
    handler = make(driver)
    gate = handler.gate()
    leave_closed(driver, handler, gate, "cuStreamWriteValue64", 2)
    driver.fail("cuStreamWriteValue64", 1)
    error = in_thread(lambda: handler.load(page_ids=[0], gpu_block_ids=[1], gate=gate))
    assert str(error) == (
        "an earlier load has failed, and the driver does not open its gate again: "
        "cuStreamWriteValue64: CUDA_ERROR_SIMULATED (1): made up by the simulated driver"
    )
    assert len(handler.poll()) == 1  # the one that failed
    assert isinstance(
        in_thread(lambda: handler.load(page_ids=[0], gpu_block_ids=[1], gate=gate)), Job
    )
    driver.set_mode("immediate")
    handler.close()
    assert [result.state for result in handler.poll()] == ["done"]


@simulated
def test_a_gate_that_was_not_opened_tells_that_the_device_is_lost(driver):
    handler = make(driver)
    gate = handler.gate()
    leave_closed(driver, handler, gate, "cuStreamWriteValue64", 2)
    driver.lose()
    error = in_thread(lambda: handler.load(page_ids=[0], gpu_block_ids=[1], after=(), gate=gate))
    assert "the device is lost" in str(error)
    in_thread(handler.close)


@simulated
def test_a_gate_that_could_be_closed_in_part_only_is_opened_again(driver):
    handler = make(driver)
    gate = handler.gate(2)
    for nth in (2, 3):  # the second part is not closed, and the first is not opened again
        driver.fail("cuStreamWriteValue64", nth)
    with pytest.raises(RuntimeError, match="cuStreamWriteValue64"):
        handler.load(page_ids=[0], gpu_block_ids=[1], after=(), layer_groups=2, gate=gate)
    gate.wait(0)
    assert not passes(driver)
    assert handler.poll() == []  # tries again
    assert passes(driver)
    in_thread(lambda: handler.load(page_ids=[0], gpu_block_ids=[1], layer_groups=2, gate=gate))
    gate.wait(1)
    assert passes(driver)
    driver.set_mode("immediate")
    handler.close()


@simulated
def test_a_load_whose_source_has_failed_leaves_its_gate_open(driver):
    handler = make(driver)
    gate = handler.gate()
    assert handler.cancel(handler.store(gpu_block_ids=[0], page_ids=[0], after=()))
    driver.run()
    handler.poll()
    writes = driver.calls("cuStreamWriteValue64")
    job = handler.load(page_ids=[0], gpu_block_ids=[1], after=(), gate=gate)  # its page is invalid
    assert job.result is not None
    assert "store 0 was cancelled" in str(job.result.error)
    assert driver.calls("cuStreamWriteValue64") == writes
    gate.wait()
    assert passes(driver)
    driver.set_mode("immediate")
    handler.close()


@simulated
def test_a_load_closes_a_gate_only_when_the_load_before_it_is_on_the_device(driver):
    before = threads()
    driver.set_mode("manual")
    driver.set_stream(0, 42)
    handler = OffloadHandler(*cache(driver), submit_thread=True)
    gate = handler.gate()
    handler.load(page_ids=[5], gpu_block_ids=[5], after=()).wait()  # starts the worker
    (worker,) = threads() - before
    assert in_time(lambda: rest({worker}))
    driver.log()
    jobs: list[Job] = []

    def load(page: int) -> threading.Thread:
        thread = threading.Thread(
            target=lambda: jobs.append(
                handler.load(page_ids=[page], gpu_block_ids=[page], after=(), gate=gate)
            )
        )
        thread.start()
        return thread

    with driver.stopped(worker):  # the first load has closed the gate, and is queued
        loading = [load(0)]
        assert in_time(lambda: driver.calls("cuStreamWriteValue64") == 1)
        asked = driver.calls("cuStreamIsCapturing")
        loading.append(load(1))
        assert in_time(lambda: driver.calls("cuStreamIsCapturing") > asked)
        assert in_time(lambda: rest({loading[1].native_id or 0}))  # the second waits in its call
    for thread in loading:
        thread.join(PATIENCE)
    values = [line[12:13] for line in driver.log().splitlines() if line.startswith("write value")]
    assert values == ["0", "1", "0", "1"]
    driver.set_mode("immediate")
    handler.close()
    assert [result.state for result in handler.poll()] == ["done"] * 3


@simulated
def test_a_gate_is_closed_on_the_current_stream_whatever_the_load_starts_behind(driver):
    handler = make(driver)
    gate = handler.gate()
    hold = driver.hold(43)
    handler.load(page_ids=[0], gpu_block_ids=[0], after=Stream(43), gate=gate)
    gate.wait()  # on the current stream: 42
    passed = passes(driver)
    driver.release(hold)
    assert passes(driver)
    driver.set_mode("immediate")
    handler.close()
    assert not passed


@simulated
def test_a_job_that_was_cancelled_is_reported_so_also_when_the_device_is_lost(driver):
    handler = make(driver)
    driver.hold(42)
    job = handler.store(gpu_block_ids=[0], page_ids=[0])
    assert handler.cancel(job)
    driver.lose()
    handler.close()
    assert [result.state for result in handler.poll()] == ["cancelled"]
