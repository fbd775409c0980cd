"""Waits on the host: they block no other thread, and leave the state of their own thread as it
was.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from error_text import error_text
from interrupts import Interrupted, Interrupter
from patience import PATIENCE, in_time
from simulated_cache import (
    CHANNELS,
    SIDE,
    SimulatedCache,
    Stream,
    let_threads_look,
    rest,
    run_until,
    states,
    threads,
)
from simulated_driver import Driver, simulated

from torch_kvswap.offload.handler import Job

OTHER = 44  # a stream
# Blocks of a job that the calling thread does not submit; of one that the driver's queue cannot hold.
LARGE, TOO_LARGE = 1024, 20000
COPY, COPY_ONE = "cuMemcpyBatchAsync", "cuMemcpyAsync"


@simulated
def test_a_timeout_names_the_first_unended_job(driver: Driver) -> None:
    with SimulatedCache(driver) as sim:
        ended = sim.load(0, 0)
        driver.run()
        assert ended.query()
        _, held = sim.hold_up("store", 1, 1)
        behind = [sim.store(2, 2), sim.store(3, 3)]
        said = "TimeoutError: after 0 s {} have not ended; the first is store 1"
        for jobs, count in (
            (None, "3 jobs"),
            ([ended, held, *behind], "3 of 4 jobs"),
            ([ended, held, behind[0], behind[0]], "3 of 4 jobs"),
        ):
            assert error_text(sim.handler.synchronize, jobs, timeout=0) == said.format(count)
        assert error_text(behind[0].synchronize, timeout=0) == (
            "TimeoutError: after 0 s 1 of 1 job has not ended; the first is store 2"
        )


@simulated
def test_others_submit_while_a_thread_waits(driver: Driver) -> None:
    with SimulatedCache(driver) as sim, ThreadPoolExecutor(1) as pool:
        hold, held = sim.hold_up("store", 1, 1)
        waiting = pool.submit(sim.handler.synchronize, held)
        for _ in range(50):
            assert not waiting.done()
            load = sim.load(2, 2)
            assert run_until(driver, load.query)
        sim.release(hold)
        assert run_until(driver, waiting.done)
        assert waiting.result() is None
        assert len(sim.handler.poll()) == 51


@pytest.mark.parametrize("waits_for", ["the job", "all jobs"])
@simulated
def test_a_handler_closes_while_threads_wait(driver: Driver, waits_for: str) -> None:
    with SimulatedCache(driver) as sim, ThreadPoolExecutor(3) as pool:
        hold, job = sim.hold_up("store", 1, 1)
        waiting = [
            pool.submit(sim.handler.synchronize, job if waits_for == "the job" else None)
            for _ in range(2)
        ]
        closing = pool.submit(sim.handler.close)
        let_threads_look(driver)
        assert not any(call.done() for call in [*waiting, closing])
        sim.release(hold)
        assert run_until(driver, lambda: all(call.done() for call in [*waiting, closing]))
        assert [call.result() for call in [*waiting, closing]] == [None] * 3
        assert states(sim.handler.poll()) == ["done"]
    assert driver.live("events") == driver.live("streams") == 0


# Threads that wait for each other: nothing below is on the device, whose worker stands still


class Call(threading.Thread):
    """A call that waits for another thread."""

    def __init__(self, body: Callable[..., object], *arguments: object) -> None:
        super().__init__(daemon=True)
        self._call = body, arguments
        self.answer: object = None
        self.start()

    def run(self) -> None:
        body, arguments = self._call
        try:
            self.answer = body(*arguments)
        except Exception as error:
            self.answer = error

    def waits(self) -> bool:
        """Whether it comes to stand still."""
        assert self.native_id is not None
        return in_time(lambda: is_asleep(self.native_id))

    def ends(self) -> object:
        """What it returned or raised."""
        self.join(PATIENCE)
        assert not self.is_alive(), "this hangs"
        return self.answer


def is_asleep(thread: int | str | None) -> bool:
    """Whether it sleeps for some time: not only until it gets the GIL."""

    def sleeps() -> bool:
        time.sleep(0.0002)
        return (
            Path(f"/proc/self/task/{thread}/stat").read_text().rpartition(")")[2].split()[0] == "S"
        )

    return all(sleeps() for _ in range(20))


@contextmanager
def stopped_worker(sim: SimulatedCache, kind: str, count: int = 1) -> Iterator[None]:
    """The worker of a channel, which starts with a job of so many blocks, stands still."""
    before = threads()
    job = sim.submit(kind, range(count), range(count)[::-1])
    run_until(sim.driver, job.query)
    (worker,) = threads() - before
    assert in_time(lambda: rest({worker}))
    with sim.driver.stopped(worker):
        yield


@pytest.mark.parametrize("waits_for", ["the job on the device", "its end"])
@simulated
def test_a_waiter_hears_of_a_cancelled_job(driver: Driver, waits_for: str) -> None:
    with SimulatedCache(driver, submit_thread=True) as sim, stopped_worker(sim, "store"):
        job = sim.store(1, 1)
        is_stream = waits_for == "the job on the device"
        waiting = Call(job.wait, Stream(SIDE)) if is_stream else Call(job.synchronize)
        assert waiting.waits()
        assert sim.handler.cancel(job)
        said = waiting.ends()
        assert said is None if is_stream else "was cancelled" in str(said)


@simulated
def test_a_second_close_waits_for_the_first(driver: Driver) -> None:
    with SimulatedCache(driver, submit_thread=True) as sim:
        with stopped_worker(sim, "store"):  # for whose end the first waits
            closing = [Call(sim.handler.close) for _ in range(2)]
            assert all(call.waits() for call in closing)
        assert [call.ends() for call in closing] == [None, None]


# A large job is queued for the worker; a thread that waits submits it if the worker sleeps on


@contextmanager
def late_worker(sim: SimulatedCache, kind: str) -> Iterator[None]:
    """The worker of the channel is stopped."""
    with stopped_worker(sim, kind, len(sim.tensors[0]) - 1):
        yield
    sim.finish()


def queue_large_job(sim: SimulatedCache, kind: str) -> tuple[Job, Callable[[], bool]]:
    """A job of all blocks but the last, and whether this thread has submitted its copies."""
    count = len(sim.tensors[0]) - 1
    job = sim.submit(kind, range(count), range(count)[::-1])
    before = sim.driver.calls_here(COPY)
    return job, lambda: sim.driver.calls_here(COPY) > before


@contextmanager
def device_that_runs_what_is_complete(sim: SimulatedCache, job: Job) -> Iterator[None]:
    """A thread of the test runs the device as soon as all copies of the job have been submitted."""
    copies = sim.driver.calls(COPY)

    def run() -> None:
        assert in_time(lambda: sim.driver.calls(COPY) > copies)
        run_until(sim.driver, job.query)

    thread = threading.Thread(target=run)
    thread.start()
    yield
    thread.join()


@pytest.mark.parametrize("how", ["host", "stream"])
@pytest.mark.parametrize("kind", CHANNELS)
@simulated
def test_a_waiter_submits_before_the_worker_wakes(driver: Driver, kind: str, how: str) -> None:
    with SimulatedCache(driver, blocks=LARGE, pages=LARGE) as sim, late_worker(sim, kind):
        pages = sim.host.pages
        job, submitted = queue_large_job(sim, kind)
        if how == "stream":
            job.wait(Stream(SIDE))
        else:
            with device_that_runs_what_is_complete(sim, job):
                sim.handler.synchronize(job, timeout=PATIENCE)
        assert submitted()
    assert sim.is_right(pages=pages)


@simulated
def test_a_wait_submits_nothing_longer_than_its_timeout(driver: Driver) -> None:
    with SimulatedCache(driver, blocks=LARGE, pages=LARGE) as sim, late_worker(sim, "store"):
        job, submitted = queue_large_job(sim, "store")
        for _ in range(20):  # some end before it has looked, on a busy machine
            with pytest.raises(TimeoutError):
                sim.handler.synchronize(job, timeout=0.0005)
        assert not submitted()


@simulated
def test_a_waiter_respects_the_drivers_queue(driver: Driver) -> None:
    with (
        SimulatedCache(driver, blocks=TOO_LARGE, pages=TOO_LARGE) as sim,
        late_worker(sim, "store"),
    ):
        _, submitted = queue_large_job(sim, "store")
        with pytest.raises(TimeoutError):
            sim.handler.synchronize(timeout=0.09)  # four times what it would take
        assert not submitted()


@simulated
def test_a_host_waiter_respects_the_channels_limit(driver: Driver) -> None:
    """Also while a thread waits until a later job is on the device, which asks for just that."""
    with SimulatedCache(driver, blocks=LARGE, pages=LARGE) as sim:
        pages = sim.host.pages
        with late_worker(sim, "store"):
            hold, _ = sim.hold_up("store")
            stores = [*sim.fill("store"), *(sim.store(1, 1) for _ in range(100))]
            load = sim.load(1, 2)
            waiting = Call(load.wait, Stream(OTHER))  # for the stores' worker, to submit those
            assert waiting.waits()
            submitted = driver.calls_here(COPY_ONE)
            with pytest.raises(TimeoutError):
                sim.handler.synchronize(stores[-1], timeout=0.1)
            assert driver.calls_here(COPY_ONE) == submitted
            sim.release(hold)
        assert waiting.ends() is None
    assert sim.is_right(pages=pages)


@simulated
def test_a_submitting_wait_spoils_no_capture(driver: Driver) -> None:
    with SimulatedCache(driver, blocks=LARGE, pages=LARGE) as sim, late_worker(sim, "store"):
        job, submitted = queue_large_job(sim, "store")
        driver.set_global_capture(True)
        with device_that_runs_what_is_complete(sim, job):
            sim.handler.synchronize(job, timeout=PATIENCE)
        driver.set_global_capture(False)
        assert submitted()
        assert driver.capture_spoilt == 0


@simulated
def test_an_interrupted_close_can_be_repeated(driver: Driver) -> None:
    with SimulatedCache(driver) as sim:
        hold, held = sim.hold_up("store", 1, 1)
        with pytest.raises(Interrupted):  # by a signal, while it waits for the store
            Interrupter(in_waits=True).call(1000, sim.handler.close)
        assert not held.query()
        assert "is closed" in error_text(sim.handler.store, gpu_block_ids=[1], page_ids=[1])
        sim.release(hold)
        driver.set_mode("immediate")
        sim.handler.close()
        assert states(sim.handler.poll()) == ["done"]
        assert (driver.live("streams"), driver.live("events")) == (0, 0)
