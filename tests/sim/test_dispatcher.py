"""What the device takes no more waits in software, in its order, and goes on by itself."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
from expecttest import assert_expected_inline
from patience import PATIENCE
from refusal import refusal
from rigs import in_time
from sim import (
    CHANNELS,
    SHARE,
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

from torch_kvswap.handler import Job, TransferError

BLOCKS = 1024
OTHER = 44  # a third stream of the caller


def copies(driver: Driver) -> int:
    return driver.calls("cuMemcpyAsync") + driver.calls("cuMemcpyBatchAsync")


def queue_up(rig: Rig, kind: str) -> tuple[int, list[Job]]:
    """A transfer that is held up, and so many of block and page 0 behind it that the last is
    queued; all that follows is queued too until the hold is released."""
    hold, first = rig.hold_up(kind)
    return hold, [first, *rig.fill(kind)]


# The queue


@pytest.mark.parametrize("kind", CHANNELS)
@stubbed
def test_what_the_device_takes_no_more_is_queued_and_runs_in_its_turn(
    driver: Driver, kind: str
) -> None:
    with Rig(driver, blocks=BLOCKS, pages=BLOCKS) as rig:
        hold, early = queue_up(rig, kind)
        late = [rig.submit(kind, [i], [BLOCKS - i]) for i in range(1, 1000)]
        given = copies(driver)
        let_threads_look(driver)
        assert copies(driver) == given
        metrics = rig.metrics(kind)
        assert metrics.queued == 1 + len(late)
        assert metrics.running == len(early) - 1
        rig.release(hold)
        results = rig.finish()
        assert states(results) == ["done"] * (len(early) + len(late))
        numbers = [result.job_id for result in results]
        assert numbers == sorted(numbers)
        assert rig.is_right()
        metrics = rig.metrics(kind)
        assert (metrics.queued, metrics.running) == (0, 0)
        assert metrics.transfers < len(early) + len(late) / 4


@stubbed
def test_what_waits_in_the_queue_is_told_apart_from_the_copy_in_the_result(driver: Driver) -> None:
    with Rig(driver) as rig:
        began = time.perf_counter()
        hold, jobs = queue_up(rig, "store")
        queued = time.perf_counter()
        let_threads_look(driver)
        driver.advance_clock(5000)
        held = time.perf_counter() - queued
        rig.release(hold)
        first, *_, last = rig.finish()
        assert (first.job_id, last.job_id) == (jobs[0].id, jobs[-1].id)
        assert first.queue_seconds == 0
        assert held <= last.queue_seconds <= time.perf_counter() - began
        assert 0 < last.copy_seconds < 1


@stubbed
def test_the_entries_of_all_copies_in_flight_are_700_at_most_time_and_again(driver: Driver) -> None:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("KVSWAP_PATH", "strided")  # an entry for each block
        rig = Rig(driver, blocks=30, pages=30)
    with rig:
        for _ in range(2):
            hold = rig.held(SIDE)
            for _ in range(28):
                rig.submit("store", range(25), range(25), after=Stream(SIDE))
            assert rig.metrics("store").queued == 0, "28 copies of 25 entries are in flight"
            rig.store(1, 1)
            assert rig.metrics("store").queued == 1, "there is no room for another entry"
            rig.release(hold)
            assert {result.path for result in rig.finish()} == {"strided"}
        assert rig.is_right()


# What is joined into one copy


def transfers_of(rig: Rig, kind: str, jobs: list[tuple[list[int], list[int], dict]]) -> int:
    """Queues the jobs, lets them run, and says in how many copies they did."""
    hold, early = queue_up(rig, kind)
    for blocks, pages, options in jobs:
        rig.submit(kind, blocks, pages, **options)
    rig.release(hold)
    assert set(states(rig.finish())) == {"done"}
    assert rig.is_right()
    return rig.metrics(kind).transfers - (len(early) - 1)


@pytest.mark.parametrize("kind", CHANNELS)
@stubbed
def test_small_jobs_are_joined_into_one_copy(driver: Driver, kind: str) -> None:
    with Rig(driver) as rig:
        # Block and page 0 are those of the job that is queued in front of them.
        assert transfers_of(rig, kind, [([i], [i], {}) for i in range(1, 10)]) == 1


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", CHANNELS)
@stubbed
def test_no_two_jobs_that_write_the_same_are_joined(driver: Driver, kind: str, seed: int) -> None:
    with Rig(driver) as rig:
        hold, _ = queue_up(rig, kind)
        for i in range(1, 10):
            blocks, pages = ([i], [5]) if kind == "store" else ([5], [i])
            rig.submit(kind, blocks, pages)
        rig.release(hold)
        driver.set_mode("threaded", seed)  # the parts of a copy go in any order
        rig.handler.wait(timeout=PATIENCE)
        assert rig.is_right()
        driver.set_mode("manual")


@pytest.mark.parametrize("kind", CHANNELS)
@stubbed
def test_jobs_that_read_the_same_are_joined(driver: Driver, kind: str) -> None:
    with Rig(driver) as rig:
        same = [([5], [i], {}) if kind == "store" else ([i], [5], {}) for i in range(1, 10)]
        assert transfers_of(rig, kind, same) == 1


@stubbed
def test_a_job_in_layer_groups_is_joined_with_no_other(driver: Driver) -> None:
    with Rig(driver, layers=2) as rig:
        hold, early = queue_up(rig, "load")
        for i in range(1, 10):
            rig.submit("load", [i], [i], layer_groups=2 if i == 5 else None)
        rig.release(hold)
        assert set(states(rig.finish())) == {"done"}
        assert rig.metrics("load").transfers == len(early) - 1 + 3


@stubbed
def test_a_job_is_joined_with_no_other_before_what_it_starts_behind_has_happened(
    driver: Driver,
) -> None:
    with Rig(driver) as rig:
        hold, _ = queue_up(rig, "store")
        before = rig.store(1, 1)
        later = rig.held(OTHER)
        job, behind = rig.store(2, 2, after=Stream(OTHER)), rig.store(3, 3)
        rig.release(hold)
        run_until(driver, before.done)
        let_threads_look(driver)
        driver.run()
        assert not job.done()
        assert not behind.done()
        rig.release(later)
        assert set(states(rig.finish())) == {"done"}


@stubbed
def test_a_job_is_joined_when_what_it_starts_behind_has_happened_meanwhile(driver: Driver) -> None:
    with Rig(driver) as rig:
        hold, early = queue_up(rig, "store")
        later = rig.held(OTHER)
        for i in range(1, 10):
            rig.store(i, i, after=Stream(OTHER))
        rig.release(later)
        driver.run(OTHER)
        rig.release(hold)
        assert set(states(rig.finish())) == {"done"}
        assert rig.metrics("store").transfers == len(early)


# Jobs that the caller does not enqueue itself


@pytest.mark.parametrize("kind", CHANNELS)
@stubbed
def test_a_small_job_needs_no_thread_and_a_large_one_is_ended_by_one(
    driver: Driver, kind: str
) -> None:
    with Rig(driver, blocks=BLOCKS, pages=BLOCKS) as rig:
        threads = number_of_threads()
        for i in range(10):
            rig.submit(kind, [i, i + 1], [i + 1, i])
        assert number_of_threads() == threads
        rig.finish()
        everything = list(range(BLOCKS))
        rig.submit(kind, everything, everything[::-1])
        assert number_of_threads() == threads + 1
        rig.submit(kind, [5], [5])
        assert states(rig.finish()) == ["done", "done"]
        assert rig.is_right()


@pytest.mark.parametrize("kind", CHANNELS)
@stubbed
def test_a_threaded_handler_leaves_every_job_to_a_thread(driver: Driver, kind: str) -> None:
    with Rig(driver, blocks=BLOCKS, pages=BLOCKS, threaded=True) as rig:
        threads = number_of_threads()
        rig.submit(kind, [0], [1])
        assert number_of_threads() == threads + 1
        everything = list(range(BLOCKS))
        rig.submit(kind, everything, everything[::-1])
        for i in range(1, 100):
            rig.submit(kind, [i, i + 1], [i + 1, i])
        results = rig.finish()
        assert states(results) == ["done"] * 101
        assert [result.job_id for result in results] == list(range(101))
        assert all(result.queue_seconds > 0 for result in results)
        assert rig.is_right()


@stubbed
def test_a_stream_can_wait_for_a_job_of_a_threaded_handler(driver: Driver) -> None:
    with Rig(driver, threaded=True) as rig:
        for _ in range(20):
            rig.store(1, 2).wait_on(Stream(SIDE))
            job = rig.load(2, 1)
            job.wait_on(Stream(SIDE))
            assert driver.run(SIDE) == 0
            driver.run()
            assert job.done()


# Jobs of several channels


@pytest.mark.parametrize("held", [True, False], ids=["held up", "only queued"])
@pytest.mark.parametrize("pair", SHARE)
@stubbed
def test_a_job_waits_for_one_in_the_queue_of_another_channel(
    driver: Driver, pair: str, held: bool
) -> None:
    (first, block, page), (second, other_block, other_page) = SHARE[pair]
    with Rig(driver) as rig:
        hold = rig.held(SIDE)
        if held:
            rig.submit(first, [0], [0], after=Stream(SIDE))
        rig.fill(first)
        rig.submit(first, [block], [page])
        later = rig.submit(second, [other_block], [other_page])
        passing = rig.submit(second, [9], [9])
        let_threads_look(driver)
        assert rig.metrics(second).queued == 2  # those behind it keep their turn
        if held:
            driver.run()
            assert not later.done()
            assert not passing.done()
        rig.release(hold)
        assert set(states(rig.finish())) == {"done"}
        assert rig.is_right()


@pytest.mark.parametrize("seed", range(8))
@stubbed
def test_random_jobs_through_full_queues_do_what_they_do_one_after_another(
    driver: Driver, seed: int
) -> None:
    import random

    random_ = random.Random(seed)
    with Rig(driver, blocks=8, pages=8) as rig:
        jobs = []
        hold = rig.held()
        for i in range(600):
            kind, count = random_.choice(CHANNELS), random_.randint(1, 3)
            ids = [random_.sample(range(8), count) for _ in range(2)]
            after = None if random_.random() < 0.1 else ()
            jobs.append(rig.submit(kind, *ids, after=after))
            if i == 300:
                rig.release(hold)
                driver.set_mode("threaded", seed)
        rig.handler.wait(timeout=PATIENCE)
        driver.set_mode("manual")
        assert rig.is_right()
        results = rig.handler.finished()
        assert sorted(r.job_id for r in results) == [job.id for job in jobs]
        for kind in ("store", "load"):
            assert rig.metrics(kind).transfers > 0


@stubbed
def test_an_expedited_load_passes_the_queue(driver: Driver) -> None:
    with Rig(driver) as rig:
        hold, early = queue_up(rig, "load")
        job = rig.submit("expedited", [1], [1])
        driver.run()
        assert job.done()
        assert [result.job_id for result in rig.handler.finished()] == [job.id]
        assert not early[0].done()
        rig.release(hold)


# Waiting


@stubbed
def test_a_stream_waits_for_a_queued_job_and_the_host_for_nothing(driver: Driver) -> None:
    with Rig(driver, blocks=BLOCKS, pages=BLOCKS) as rig:
        hold, early = queue_up(rig, "store")
        jobs = [rig.store(i, i) for i in range(1, 1000)]
        behind = [rig.store(i, i) for i in range(1000, 1010)]
        jobs[-1].wait_on(Stream(OTHER))
        assert rig.metrics("store").queued <= len(behind)
        driver.run()
        assert not driver.cuda.is_done(stream=OTHER)
        assert not early[0].done()
        rig.release(hold)
        driver.run(OTHER)
        assert not driver.cuda.is_done(stream=OTHER)
        run_until(driver, jobs[-1].done)
        assert driver.cuda.is_done(stream=OTHER)
        assert set(states(rig.finish())) == {"done"}


@stubbed
def test_a_stream_waits_for_a_queued_job_behind_a_queue_of_another_channel(driver: Driver) -> None:
    with Rig(driver) as rig:
        hold, _ = queue_up(rig, "store")
        rig.store(1, 2)
        job = rig.load(2, 3)
        job.wait_on(Stream(OTHER))
        assert rig.metrics("store").queued == 0
        driver.run()
        assert not driver.cuda.is_done(stream=OTHER)
        rig.release(hold)
        assert set(states(rig.finish())) == {"done"}
        assert driver.cuda.is_done(stream=OTHER)


@stubbed
def test_the_host_waits_for_queued_jobs_as_long_as_it_is_told_to(driver: Driver) -> None:
    with Rig(driver) as rig:
        hold, early = queue_up(rig, "store")
        job = rig.store(1, 1)
        for jobs in (None, [job], early):
            began = time.monotonic()
            with pytest.raises(TimeoutError):
                rig.handler.wait(jobs, timeout=0.02)
            assert time.monotonic() - began >= 0.02
        assert refusal(rig.handler.wait, job, timeout=0) == (
            f"TimeoutError: after 0 s some jobs still run: store {job.id}"
        )
        rig.release(hold)
        driver.set_mode("threaded")
        rig.handler.wait(job, timeout=PATIENCE)
        assert job.result is not None
        rig.handler.wait()
        driver.set_mode("manual")
        assert rig.holds(1, rig.block(1))


@stubbed
def test_many_threads_submit_and_every_job_is_reported_once(driver: Driver) -> None:
    with Rig(driver) as rig:
        driver.set_mode("threaded")
        reported, submitted = [], []

        def work(number: int) -> None:
            for i in range(100):
                kind = CHANNELS[(number + i) % 3]
                job = rig.submit(kind, [4 * number + i % 4], [4 * number + i % 4])
                submitted.append(job.id)
                if i % 10 == 0:
                    rig.handler.wait(job)
                reported.extend(rig.handler.finished())

        threads = [threading.Thread(target=work, args=[number]) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        rig.handler.wait()
        reported += rig.handler.finished()
        driver.set_mode("manual")
        assert sorted(submitted) == list(range(400))
        assert sorted(result.job_id for result in reported) == list(range(400))
        assert set(states(reported)) == {"done"}


# Cancelling


@pytest.mark.parametrize("kind", CHANNELS)
@stubbed
def test_a_cancelled_queued_job_ends_at_once_and_the_others_go_on(
    driver: Driver, kind: str
) -> None:
    with Rig(driver) as rig:
        hold, _ = queue_up(rig, kind)
        rig.submit(kind, [1], [2])
        job = rig.submit(kind, [3], [4])
        rig.submit(kind, [5], [6])
        assert rig.handler.cancel(job)
        assert job.done()
        assert job.result is not None
        assert (job.result.state, job.result.ok, job.result.copy_seconds) == ("cancelled", False, 0)
        assert [result.job_id for result in rig.handler.finished()] == [job.id]
        assert not rig.handler.cancel(job)
        with pytest.raises(TransferError, match=f"{job.direction} {job.id} was cancelled"):
            job.wait_on()
        rig.release(hold)
        assert set(states(rig.finish())) == {"done"}
        assert rig.is_right(without=[job])


@stubbed
def test_a_cancelled_running_job_ends_with_its_copy(driver: Driver) -> None:
    with Rig(driver) as rig:
        hold, job = rig.hold_up("store", 1, 2)
        for _ in range(2):
            assert rig.handler.cancel(job)
        assert not job.done()
        assert rig.handler.finished() == []
        job.wait_on(Stream(OTHER))  # the copy is still to be waited for
        assert not driver.cuda.is_done(stream=OTHER)
        rig.release(hold)
        assert states(rig.finish()) == ["cancelled"]
        assert not rig.handler.cancel(job)


@stubbed
def test_a_cancelled_job_of_a_joined_copy_leaves_the_others_alone(driver: Driver) -> None:
    with Rig(driver) as rig:
        hold, early = queue_up(rig, "store")
        jobs = [rig.store(i, i) for i in range(1, 4)]
        jobs[-1].wait_on(Stream(OTHER))  # they are on the device now
        assert rig.metrics("store").transfers == len(early)
        assert rig.handler.cancel(jobs[1])
        rig.release(hold)
        assert states(rig.finish())[-3:] == ["done", "cancelled", "done"]
        assert rig.holds(1, rig.block(1))
        assert rig.holds(3, rig.block(3))


@stubbed
def test_a_job_that_has_ended_cannot_be_cancelled(driver: Driver) -> None:
    with Rig(driver) as rig:
        job = rig.store(1, 2)
        driver.run()  # nobody has looked yet
        assert not rig.handler.cancel(job)
        assert states(rig.handler.finished()) == ["done"]
        assert not rig.handler.cancel(job)


@pytest.mark.parametrize("first", ["running", "queued"])
@stubbed
def test_a_job_waits_for_the_one_in_front_of_a_cancelled_one(driver: Driver, first: str) -> None:
    with Rig(driver) as rig:
        hold = rig.held(SIDE)
        if first == "running":
            rig.submit("load", [1], [2], after=Stream(SIDE))
            rig.fill("load")
        else:
            rig.submit("load", [0], [0], after=Stream(SIDE))
            rig.fill("load")
            rig.load(2, 1)
        middle = rig.load(3, 1)
        assert rig.handler.cancel(middle)
        assert states(rig.handler.finished()) == ["cancelled"]
        last = rig.submit("store", [1], [5])
        let_threads_look(driver)
        driver.run()
        assert not last.done()
        rig.release(hold)
        assert set(states(rig.finish())) == {"done"}
        assert rig.is_right(without=[middle])


# Closing


@pytest.mark.parametrize("close", ["handler", "pool"])
@stubbed
def test_closing_waits_for_all_that_is_queued_and_ends_the_threads(
    driver: Driver, close: str
) -> None:
    threads = number_of_threads()
    with Rig(driver, blocks=BLOCKS, pages=BLOCKS) as rig:
        holds = [queue_up(rig, kind)[0] for kind in CHANNELS]
        jobs = [rig.submit(CHANNELS[i % 3], [i], [i + 1]) for i in range(1, 1000)]
        cancelled = rig.store(BLOCKS - 1, 5)
        assert rig.handler.cancel(cancelled)
        assert number_of_threads() == threads + 3
        pages = rig.host.pages
        driver.set_mode("threaded")
        closing = threading.Thread(target=(rig.handler if close == "handler" else rig.host).close)
        closing.start()
        # Until it is closed, the page is what is wrong.
        assert in_time(lambda: "is closed" in refusal(rig.handler.store, [1], [BLOCKS]))
        assert refusal(rig.store, 1, 1) == "RuntimeError: the handler is closed; make a new one"
        let_threads_look(driver)
        assert closing.is_alive()
        for hold in holds:
            rig.release(hold)
        closing.join(PATIENCE)
        assert not closing.is_alive()
        driver.set_mode("manual")
        assert in_time(lambda: number_of_threads() == threads)
        results = {result.job_id: result.state for result in rig.handler.finished()}
        assert results.pop(cancelled.id) == "cancelled"
        assert set(results.values()) == {"done"}
        assert {job.id for job in jobs} < set(results)
        assert rig.is_right(without=[cancelled], pages=pages)
        assert jobs[-1].done()
        assert not rig.handler.cancel(jobs[-1])
        jobs[-1].wait_on()
        rig.handler.close()


@stubbed
def test_a_handler_that_is_dropped_with_a_full_queue_waits_for_it(driver: Driver) -> None:
    rig = Rig(driver)
    tensors, pages = rig.tensors, rig.host.pages
    threads = number_of_threads()
    hold = queue_up(rig, "store")[0]
    rig.submit("store", [1], [2])
    assert number_of_threads() == threads + 1
    rig.release(hold)
    driver.set_mode("threaded")
    del rig.handler
    driver.set_mode("manual")
    assert number_of_threads() == threads
    assert (pages[2, 0] == tensors[0][1]).all()


# What it costs to do nothing


def wakes() -> dict[str, str]:
    """How often each thread of the process has been woken."""
    return {
        str(path): next(
            line for line in (path / "status").read_text().splitlines() if "voluntary" in line
        )
        for path in Path("/proc/self/task").iterdir()
    }


@pytest.mark.parametrize("state", ["nothing to do", "all on the device"])
@stubbed
def test_an_idle_handler_asks_the_driver_nothing_and_wakes_no_thread(
    driver: Driver, state: str
) -> None:
    names = ["cuEventQuery", "cuStreamQuery", "cuCtxPushCurrent", "cuEventRecord"]
    with Rig(driver, blocks=BLOCKS, pages=BLOCKS) as rig:
        for kind in CHANNELS:
            rig.submit(kind, list(range(BLOCKS)), list(range(BLOCKS)))
        rig.finish()
        if state == "all on the device":
            hold = rig.held()
            rig.store(1, 1, after=None)
            rig.load(1, 2)
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
            rig.release(hold)


@stubbed
def test_events_stay_few_however_much_is_queued(driver: Driver) -> None:
    with Rig(driver) as rig:
        hold, _ = queue_up(rig, "store")
        events = driver.live("events")
        for _ in range(3000):
            rig.store(1, 1)
        assert driver.live("events") == events
        rig.release(hold)
        assert rig.handler.cancel(rig.store(2, 2))
        rig.finish()
        assert driver.live("events") <= 2 * events


@stubbed
def test_a_joined_copy_is_one_transfer_that_waits_for_what_each_job_waits_for(
    driver: Driver,
) -> None:
    with Rig(driver) as rig:
        hold, _ = queue_up(rig, "load")
        rig.store(4, 5, after=Stream(SIDE))
        for i in range(1, 4):
            rig.load(i, i)
        job = rig.load(5, 5)
        rig.start_log()
        job.wait_on()
        assert_expected_inline(
            rig.log(),
            """\
wait for event 1 on loads
record event 2 on loads
batch of 2 on loads
record event 3 on loads
wait for event 3 on current
""",
        )
        rig.release(hold)
        assert set(states(rig.finish())) == {"done"}
        assert rig.is_right()
