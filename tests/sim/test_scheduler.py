"""Jobs that the device has no room for are queued, keep their order, and start without being
polled.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from error_text import error_text
from patience import PATIENCE, in_time
from simulated_cache import (
    CHANNELS,
    SHARE,
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
from simulated_driver import DEVICE, Driver, simulated

from torch_kvswap.offload.handler import Job
from torch_kvswap.results import TransferError

BLOCKS = 1024
OTHER = 44  # a third stream of the caller


def copies(driver: Driver) -> int:
    return driver.calls("cuMemcpyAsync") + driver.calls("cuMemcpyBatchAsync")


def queue_up(sim: SimulatedCache, kind: str) -> tuple[int, list[Job]]:
    """A transfer that is held up, and so many of block and page 0 behind it that the last is
    queued; all that follows is queued too until the hold is released."""
    hold, first = sim.hold_up(kind)
    return hold, [first, *sim.fill(kind)]


# The queue


@pytest.mark.parametrize("kind", CHANNELS)
@simulated
def test_what_the_device_refuses_is_queued_in_turn(driver: Driver, kind: str) -> None:
    with SimulatedCache(driver, blocks=BLOCKS, pages=BLOCKS) as sim:
        hold, early = queue_up(sim, kind)
        late = [sim.submit(kind, [i], [BLOCKS - i]) for i in range(1, 1000)]
        given = copies(driver)
        let_threads_look(driver)
        assert copies(driver) == given
        metrics = sim.metrics(kind)
        assert metrics.queued == 1 + len(late)
        assert metrics.running == len(early) - 1
        sim.release(hold)
        results = sim.finish()
        assert states(results) == ["done"] * (len(early) + len(late))
        numbers = [result.job_id for result in results]
        assert numbers == sorted(numbers)
        assert sim.is_right()
        metrics = sim.metrics(kind)
        assert (metrics.queued, metrics.running) == (0, 0)
        assert metrics.transfers < len(early) + len(late) / 4


@simulated
def test_queue_seconds_and_copy_seconds_are_told_apart(driver: Driver) -> None:
    with SimulatedCache(driver) as sim:
        began = time.perf_counter()
        hold, jobs = queue_up(sim, "store")
        queued = time.perf_counter()
        let_threads_look(driver)
        driver.advance_clock(5000)
        held = time.perf_counter() - queued
        sim.release(hold)
        first, *_, last = sim.finish()
        assert (first.job_id, last.job_id) == (jobs[0].id, jobs[-1].id)
        assert first.queue_seconds == 0
        assert held <= last.queue_seconds <= time.perf_counter() - began
        assert 0 < last.copy_seconds < 5000


@simulated
def test_at_most_700_entries_are_in_flight(driver: Driver) -> None:
    # An entry for each block.
    with SimulatedCache(driver, blocks=30, pages=30, copy_method="strided") as sim:
        for _ in range(2):
            hold = sim.held(SIDE)
            for _ in range(35):
                sim.submit("store", range(20), range(20), after=Stream(SIDE))
            assert sim.metrics("store").queued == 0, "35 copies of 20 entries are in flight"
            sim.store(1, 1)
            assert sim.metrics("store").queued == 1, "there is no room for another entry"
            sim.release(hold)
            assert {result.copy_method for result in sim.finish()} == {"strided"}
        assert sim.is_right()


@pytest.mark.parametrize("kind", CHANNELS)
@simulated
def test_a_too_large_job_runs_by_itself(driver: Driver, kind: str) -> None:
    # An entry for each block.
    with SimulatedCache(driver, blocks=750, pages=750, copy_method="strided") as sim:
        first = sim.submit(kind, [0], [0])
        job = sim.submit(kind, range(750), range(750))
        run_until(driver, job.query)  # nobody waits for it
        assert first.query()
        assert job.result is not None
        assert job.result.copy_method == "strided"
        assert sim.is_right()


# What is joined into one copy


@simulated
def test_loads_by_layer_groups_are_not_joined(driver: Driver) -> None:
    with SimulatedCache(driver, layers=2) as sim:
        hold, early = queue_up(sim, "load")
        for i in range(1, 10):
            sim.submit("load", [i], [i], layer_groups=2 if i == 5 else None)
        sim.release(hold)
        assert set(states(sim.finish())) == {"done"}
        assert sim.metrics("load").transfers == len(early) - 1 + 3


@simulated
def test_a_job_that_must_wait_is_not_joined(driver: Driver) -> None:
    with SimulatedCache(driver) as sim:
        hold, _ = queue_up(sim, "store")
        before = sim.store(1, 1)
        later = sim.held(OTHER)
        job, behind = sim.store(2, 2, after=Stream(OTHER)), sim.store(3, 3)
        sim.release(hold)
        run_until(driver, before.query)
        let_threads_look(driver)
        driver.run()
        assert not job.query()
        assert not behind.query()
        sim.release(later)
        assert set(states(sim.finish())) == {"done"}


@pytest.mark.parametrize("kind", CHANNELS)
@simulated
def test_a_threaded_handler_leaves_jobs_to_threads(driver: Driver, kind: str) -> None:
    with SimulatedCache(driver, blocks=BLOCKS, pages=BLOCKS, submit_thread=True) as sim:
        before = threads()
        sim.submit(kind, [0], [1])
        assert new_threads(before) == 1
        everything = list(range(BLOCKS))
        sim.submit(kind, everything, everything[::-1])
        for i in range(1, 100):
            sim.submit(kind, [i, i + 1], [i + 1, i])
        results = sim.finish()
        assert states(results) == ["done"] * 101
        assert [result.job_id for result in results] == list(range(101))
        assert all(result.queue_seconds > 0 for result in results)
        assert sim.is_right()


@pytest.mark.parametrize("held", [True, False], ids=["held up", "only queued"])
@pytest.mark.parametrize("pair", SHARE)
@simulated
def test_a_job_waits_for_another_channels_queue(driver: Driver, pair: str, held: bool) -> None:
    (first, block, page), (second, other_block, other_page) = SHARE[pair]
    with SimulatedCache(driver) as sim:
        hold = sim.held(SIDE)
        if held:
            sim.submit(first, [0], [0], after=Stream(SIDE))
        sim.fill(first)
        sim.submit(first, [block], [page])
        later = sim.submit(second, [other_block], [other_page])
        passing = sim.submit(second, [9], [9])
        let_threads_look(driver)
        assert sim.metrics(second).queued == 2  # those behind it keep their turn
        if held:
            driver.run()
            assert not later.query()
            assert not passing.query()
        sim.release(hold)
        assert set(states(sim.finish())) == {"done"}
        assert sim.is_right()


# Waiting


@simulated
def test_a_stream_waits_behind_another_channels_queue(driver: Driver) -> None:
    with SimulatedCache(driver) as sim:
        hold, _ = queue_up(sim, "store")
        sim.store(1, 2)
        job = sim.load(2, 3)
        job.wait(Stream(OTHER))
        assert sim.metrics("store").queued == 0
        driver.run()
        assert not driver.cuda.is_done(stream=OTHER)
        sim.release(hold)
        assert set(states(sim.finish())) == {"done"}
        assert driver.cuda.is_done(stream=OTHER)


# Cancelling


@pytest.mark.parametrize("kind", CHANNELS)
@simulated
def test_a_cancelled_queued_job_ends_at_once(driver: Driver, kind: str) -> None:
    with SimulatedCache(driver) as sim:
        hold, _ = queue_up(sim, kind)
        sim.submit(kind, [1], [2])
        job = sim.submit(kind, [3], [4])
        sim.submit(kind, [5], [6])
        assert sim.handler.cancel(job)
        assert job.query()
        assert job.result is not None
        assert (job.result.state, job.result.ok, job.result.copy_seconds) == ("cancelled", False, 0)
        assert [result.job_id for result in sim.handler.poll()] == [job.id]
        assert not sim.handler.cancel(job)
        with pytest.raises(TransferError, match=f"{job.direction} {job.id} was cancelled"):
            job.synchronize()
        job.wait()  # which says nothing of it
        sim.release(hold)
        assert set(states(sim.finish())) == {"done"}
        assert sim.is_right(without=[job])


@simulated
def test_a_cancelled_running_job_ends_with_its_copy(driver: Driver) -> None:
    with SimulatedCache(driver) as sim:
        hold, job = sim.hold_up("store", 1, 2)
        for _ in range(2):
            assert sim.handler.cancel(job)
        assert not job.query()
        assert sim.handler.poll() == []
        job.wait(Stream(OTHER))  # the copy is still to be waited for
        assert not driver.cuda.is_done(stream=OTHER)
        sim.release(hold)
        assert states(sim.finish()) == ["cancelled"]
        assert not sim.handler.cancel(job)


@simulated
def test_cancelling_a_joined_job_leaves_the_others(driver: Driver) -> None:
    with SimulatedCache(driver) as sim:
        hold, early = queue_up(sim, "store")
        jobs = [sim.store(i, i) for i in range(1, 4)]
        jobs[-1].wait(Stream(OTHER))  # they are on the device now
        assert sim.metrics("store").transfers == len(early)
        assert sim.handler.cancel(jobs[1])
        sim.release(hold)
        assert states(sim.finish())[-3:] == ["done", "cancelled", "done"]
        assert sim.holds(1, sim.block(1))
        assert sim.holds(3, sim.block(3))


@simulated
def test_a_job_that_has_ended_cannot_be_cancelled(driver: Driver) -> None:
    with SimulatedCache(driver) as sim:
        job = sim.store(1, 2)
        driver.run()  # nobody has looked yet
        assert not sim.handler.cancel(job)
        assert states(sim.handler.poll()) == ["done"]
        assert not sim.handler.cancel(job)


@pytest.mark.parametrize("close", ["handler", "pool"])
@simulated
def test_closing_waits_for_the_queue_and_threads(driver: Driver, close: str) -> None:
    before = threads()
    with SimulatedCache(driver, blocks=BLOCKS, pages=BLOCKS) as sim:
        holds = [queue_up(sim, kind)[0] for kind in CHANNELS]
        jobs = [sim.submit(CHANNELS[i % 3], [i], [i + 1]) for i in range(1, 1000)]
        cancelled = sim.store(BLOCKS - 1, 5)
        assert sim.handler.cancel(cancelled)
        assert new_threads(before) == 3
        pages = sim.host.pages
        driver.set_mode("threaded")
        closing = threading.Thread(target=(sim.handler if close == "handler" else sim.host).close)
        closing.start()
        # Until it is closed, the page is what is wrong.
        assert in_time(
            lambda: (
                "is closed" in error_text(sim.handler.store, gpu_block_ids=[1], page_ids=[BLOCKS])
            )
        )
        assert error_text(sim.store, 1, 1) == "RuntimeError: the handler is closed; make a new one"
        let_threads_look(driver)
        assert closing.is_alive()
        for hold in holds:
            sim.release(hold)
        closing.join(PATIENCE)
        assert not closing.is_alive()
        driver.set_mode("manual")
        assert in_time(lambda: new_threads(before) == 0)
        results = {result.job_id: result.state for result in sim.handler.poll()}
        assert results.pop(cancelled.id) == "cancelled"
        assert set(results.values()) == {"done"}
        assert {job.id for job in jobs} < set(results)
        assert sim.is_right(without=[cancelled], pages=pages)
        assert jobs[-1].query()
        assert not sim.handler.cancel(jobs[-1])
        jobs[-1].wait()
        sim.handler.close()


def wakes() -> dict[str, str]:
    """How often each thread of the process has been woken."""
    return {
        str(path): next(
            line for line in (path / "status").read_text().splitlines() if "voluntary" in line
        )
        for path in Path("/proc/self/task").iterdir()
    }


@pytest.mark.parametrize("state", ["nothing to do", "all on the device"])
@simulated
def test_an_idle_handler_wakes_nobody(driver: Driver, state: str) -> None:
    names = ["cuEventQuery", "cuStreamQuery", "cuCtxPushCurrent", "cuEventRecord"]
    with SimulatedCache(driver, blocks=BLOCKS, pages=BLOCKS) as sim:
        for kind in CHANNELS:
            sim.submit(kind, list(range(BLOCKS)), list(range(BLOCKS)))
        sim.finish()
        if state == "all on the device":
            hold = sim.held()
            sim.store(1, 1, after=None)
            sim.load(1, 2)
        own = threading.get_native_id()
        assert in_time(lambda: rest(threads() - {own}))
        before = [driver.calls(name) for name in names], wakes()
        time.sleep(0.2)  # in which nothing happens; what looks once a second is not found here
        after = [driver.calls(name) for name in names], wakes()
        assert after[0] == before[0]
        assert len(before[1]) > 3
        changed = [path for path in before[1] if after[1][path] != before[1][path]]
        assert [path for path in changed if path != f"/proc/self/task/{own}"] == []
        if state == "all on the device":
            sim.release(hold)


@simulated
def test_events_stay_few_however_much_is_queued(driver: Driver) -> None:
    with SimulatedCache(driver) as sim:
        hold, _ = queue_up(sim, "store")
        events = driver.live("events")
        for _ in range(3000):
            sim.store(1, 1)
        assert driver.live("events") == events
        sim.release(hold)
        assert sim.handler.cancel(sim.store(2, 2))
        sim.finish()
        assert driver.live("events") <= 2 * events


@simulated
def test_queued_jobs_behind_a_stream_share_events(driver: Driver) -> None:
    with SimulatedCache(driver, blocks=512, pages=512) as sim:
        hold, _ = queue_up(sim, "store")
        written = driver.memory(512 * 64, DEVICE).view(512, 64).random_(256)
        busy = sim.held(OTHER)
        events = driver.live("events")
        for i in range(1, 512):
            driver.cuda.copy(sim.tensors[0][i], written[i], OTHER)
            sim.store(i, i, after=Stream(OTHER))
        assert driver.live("events") <= events + 256
        pages = sim.host.pages[1:].clone()
        sim.release(hold)
        driver.run()
        assert torch.equal(sim.host.pages[1:], pages)
        sim.release(busy)
        assert {*states(sim.finish())} == {"done"}
        assert torch.equal(sim.host.pages[1:, 0], written[1:])


@simulated
def test_threads_default_streams_share_no_events(driver: Driver) -> None:
    """The handle is the same in all threads, and the stream another one in each."""
    own = Stream(2)
    with SimulatedCache(driver, blocks=512, pages=512) as sim:
        hold, _ = queue_up(sim, "store")
        first = sim.held(own.cuda_stream)
        for i in range(1, 300):  # more than have events of their own
            sim.store(i, i, after=own)
        second = sim.held(own.cuda_stream)
        last = sim.store(300, 300, after=own)

        def submit() -> Job:
            driver.cuda.is_done(stream=own.cuda_stream)  # in a context
            holds.append(sim.held(own.cuda_stream))
            return sim.store(301, 301, after=own)

        holds: list[int] = []
        with ThreadPoolExecutor(1) as pool:
            other = pool.submit(submit).result()
            for released in (hold, first, *holds):
                sim.release(released)
            before = sim.page(300)
            assert run_until(driver, lambda: sim.metrics("store").queued == 0)
            driver.run()
            assert not last.query()
            assert sim.holds(300, before)
            sim.release(second)
            sim.finish()
        assert other.query()
        assert sim.is_right()
