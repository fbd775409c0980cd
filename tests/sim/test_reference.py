"""What the reference handler's copies wait for, on the simulated driver. Each test of an order has a
control that breaks it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from patience import in_time
from simulated_driver import Driver, cache, simulated
from simulated_driver.cuda import CudaError

from torch_kvswap.reference import Job, ReferenceHandler
from torch_kvswap.results import DeviceLostError

CURRENT, SIDE = 42, 43  # streams of the caller
BLOCKS = 20  # of two layers: two calls of the driver take all of them


class Stream:
    entered: ClassVar = [CURRENT]  # the last one is current

    def __init__(self, driver: Driver, handle: int) -> None:
        self.driver, self.handle = driver, handle

    def __enter__(self) -> None:
        self.entered.append(self.handle)
        self.driver.set_stream(0, self.handle)

    def __exit__(self, *_: object) -> None:
        self.entered.pop()
        self.driver.set_stream(0, self.entered[-1])


class Event:
    """As a torch.cuda.Event, also when it was never recorded: then it has happened."""

    def __init__(self, driver: Driver) -> None:
        self.cuda, self.handle = driver.cuda, driver.cuda.create_event()

    def record(self, stream: Stream) -> None:
        self.cuda.record(self.handle, stream.handle)

    def wait(self, stream: Stream) -> None:
        self.cuda.wait(stream.handle, self.handle)

    def query(self) -> bool:
        try:
            return self.cuda.is_done(event=self.handle)
        except CudaError as error:
            raise torch.AcceleratorError(str(error)) from error

    def synchronize(self) -> None:
        try:
            self.cuda.synchronize(event=self.handle)
        except CudaError as error:
            raise torch.AcceleratorError(str(error)) from error

    def elapsed_time(self, end: Event) -> float:
        return self.cuda.elapsed(self.handle, end.handle)


class SimulatedHandler(ReferenceHandler):
    """With streams and events of the simulated driver."""

    def __init__(self, driver: Driver, *memory: Any) -> None:
        self.driver = driver
        super().__init__(*memory)

    def _new_stream(self) -> Stream:
        return Stream(self.driver, self.driver.cuda.create_stream())

    def _current_stream(self) -> Stream:
        return Stream(self.driver, Stream.entered[-1])

    def _new_event(self) -> Event:
        return Event(self.driver)


class Simulated:
    """A cache and a pool of random bytes, and a handler. Nothing runs until a test says so."""

    def __init__(self, driver: Driver, mode: str = "manual") -> None:
        driver.set_mode(mode)
        driver.set_stream(0, CURRENT)
        self.driver = driver
        self.layout, self.host = cache(driver, BLOCKS, BLOCKS)
        self.host.pages.random_(256)
        self.handler = self.another_handler()

    def another_handler(self) -> ReferenceHandler:
        return SimulatedHandler(self.driver, self.layout, self.host)

    def block(self, block: int) -> bytes:
        return b"".join(tensor[block].numpy().tobytes() for tensor in self.layout.tensors)

    def page(self, page: int) -> bytes:
        return bytes(self.host.pages[page, 0].tolist())

    def store(self, block: int, page: int, handler: ReferenceHandler | None = None) -> Job:
        return (handler or self.handler).store(gpu_block_ids=[block], page_ids=[page])

    def load(self, page: int, block: int, handler: ReferenceHandler | None = None) -> Job:
        return (handler or self.handler).load(page_ids=[page], gpu_block_ids=[block])

    def side(self) -> Stream:
        return Stream(self.driver, SIDE)


def when_it_waits(driver: Driver, call: Callable[[], None]) -> threading.Thread:
    """Calls it in another thread as soon as this one waits for an event."""
    asked = driver.calls("cuEventSynchronize")
    waits = lambda: driver.calls("cuEventSynchronize") > asked  # noqa: E731
    thread = threading.Thread(target=lambda: in_time(waits) and call())
    thread.start()
    return thread


ORDER = pytest.mark.parametrize("order", ["kept", "lost as a control"])


@ORDER
@pytest.mark.parametrize(
    ("first", "second"),
    [
        (("store", 1, 0), ("load", 2, 0)),  # the load of a page behind the store of it
        (("load", 1, 0), ("store", 1, 3)),  # the store of a block behind the load into it
        (("store", 1, 0), ("store", 2, 0)),
        (("load", 1, 0), ("load", 1, 3)),
    ],
)
@simulated
def test_a_transfer_waits_for_the_one_before_it(
    driver: Driver, first: tuple[str, int, int], second: tuple[str, int, int], order: str
) -> None:
    sim = Simulated(driver)
    blocks, pages = ([get(i) for i in range(4)] for get in (sim.block, sim.page))
    for direction, block, page in (first, second):
        if direction == "store":
            pages[page] = blocks[block]
        else:
            blocks[block] = pages[page]
    other = sim.handler if order == "kept" else sim.another_handler()
    hold = driver.hold(SIDE)
    with sim.side():
        getattr(sim, first[0])(*(first[1:] if first[0] == "store" else first[:0:-1]))
    job = getattr(sim, second[0])(*(second[1:] if second[0] == "store" else second[:0:-1]), other)
    driver.run()
    assert job.query() == (order != "kept")
    driver.release(hold)
    driver.run()
    found = [sim.block(i) for i in range(4)], [sim.page(i) for i in range(4)]
    assert (found == (blocks, pages)) == (order == "kept")


@simulated
def test_a_host_wait_ends_with_the_job(driver: Driver) -> None:
    sim = Simulated(driver, "threaded")
    for call in (Job.synchronize, lambda job: sim.handler.synchronize()):
        hold, released = driver.hold(CURRENT), list[bool]()
        job = sim.store(1, 2)

        def release(hold: int = hold, released: list[bool] = released) -> None:
            released.append(True)
            driver.release(hold)

        assert sim.handler.poll() == []
        thread = when_it_waits(driver, release)
        call(job)
        assert released
        assert sim.handler.poll() == [job.result]
        thread.join()


@simulated
def test_a_partly_submitted_copy_fails_at_its_end(driver: Driver) -> None:
    sim = Simulated(driver, "threaded")
    everything, hold = list(range(BLOCKS)), driver.hold(CURRENT)
    driver.fail("cuMemcpyBatchAsync", nth=2)
    bad = sim.handler.store(gpu_block_ids=everything, page_ids=everything)
    assert not bad.query()
    driver.release(hold)
    good = sim.store(3, 4)
    sim.handler.synchronize([good])
    assert [result.state for result in sim.handler.poll()] == ["failed", "done"]
    assert bad.result is not None
    assert "cuMemcpyBatchAsync" in str(bad.result.error)
    assert sim.page(4) == sim.block(3)


@simulated
def test_a_lost_device_fails_jobs_and_close_returns(driver: Driver) -> None:
    sim = Simulated(driver)
    driver.hold(CURRENT)
    jobs = [sim.store(1, 2), sim.load(3, 4)]
    driver.lose()
    with pytest.raises(CudaError):
        sim.store(1, 2)
    sim.handler.close()
    assert all(job.query() for job in jobs)
    assert {type(result.error) for result in sim.handler.poll()} == {DeviceLostError}
    assert sim.handler.poll() == []
