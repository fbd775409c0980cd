"""A job fails when what it reads was never written, and only then."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from sim import SIDE, Rig, Stream, run_until
from simulated_driver import Driver, stubbed

from torch_kvswap.handler import Job


def state(job: Job) -> str:
    return "open" if job.result is None else job.result.state


def error(job: Job) -> str:
    assert job.result is not None
    return str(job.result.error)


def reason(source: Job) -> str:
    """How the error begins of what needs the job."""
    how = "was cancelled" if state(source) == "cancelled" else f"failed: {error(source)}"
    return f"{source.direction} {source.id} {how}"


def fails(rig: Rig, kind: str, block: int, page: int) -> Job:
    rig.driver.fail("cuMemcpyAsync")
    return rig.submit(kind, [block], [page])


def is_cancelled_in_the_queue(rig: Rig, kind: str, block: int, page: int) -> Job:
    rig.fill(kind, 15, 15)
    job = rig.submit(kind, [block], [page])
    assert rig.handler.cancel(job)
    assert job.done()
    return job


def is_cancelled_while_it_runs(rig: Rig, kind: str, block: int, page: int) -> Job:
    job = rig.submit(kind, [block], [page])
    assert rig.handler.cancel(job)
    assert not job.done()
    return job


ENDS: dict[str, Callable[[Rig, str, int, int], Job]] = {
    "failed": fails,
    "cancelled in the queue": is_cancelled_in_the_queue,
    "cancelled while it runs": is_cancelled_while_it_runs,
}
REPORTED = pytest.mark.parametrize("reported", [False, True], ids=["unreported", "reported"])


@REPORTED
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("kind", ["load", "expedited"])
@stubbed
def test_a_load_of_a_page_that_was_not_stored_fails_until_it_is_stored(
    driver: Driver, kind: str, end: str, reported: bool
) -> None:
    with Rig(driver) as rig:
        store = ENDS[end](rig, "store", 1, 2)
        if reported:
            rig.finish()
        load, other = rig.submit(kind, [3], [2]), rig.submit(kind, [4], [5])
        kept = rig.block(3)
        rig.finish()
        assert (state(load), state(other)) == ("failed", "done")
        assert error(load).startswith(reason(store))
        if end != "cancelled while it runs" or reported:
            assert (rig.block(3) == kept).all()
        again = rig.submit(kind, [3], [2])
        rig.finish()
        assert state(again) == "failed"
        rig.store(6, 2)
        valid = rig.submit(kind, [7], [2])
        rig.finish()
        assert state(valid) == "done"
        assert (rig.block(7) == rig.block(6)).all()


@pytest.mark.parametrize("kind", ["load", "expedited"])
@pytest.mark.parametrize("end", ENDS)
@stubbed
def test_a_store_of_a_block_that_was_not_loaded_fails_until_that_is_reported(
    driver: Driver, end: str, kind: str
) -> None:
    with Rig(driver) as rig:
        load = ENDS[end](rig, kind, 1, 2)
        store, other = rig.store(1, 3), rig.store(4, 5)
        run_until(driver, rig.has_ended)
        later = rig.store(1, 6)
        assert [state(job) for job in (store, other, later)] == ["failed", "done", "failed"]
        for job in (store, later):
            assert error(job).startswith(reason(load))
        rig.finish()
        valid = rig.store(1, 3)
        rig.finish()
        assert state(valid) == "done"
        assert rig.holds(3, rig.block(1))


@stubbed
def test_failures_follow_the_data_through_stores_and_loads(driver: Driver) -> None:
    with Rig(driver) as rig:
        hold = rig.held(SIDE)
        first = rig.store(1, 1, after=Stream(SIDE))
        chain = [rig.load(1, 2), rig.store(2, 2), rig.submit("expedited", [3], [2])]
        chain.append(rig.store(3, 3))
        beside = [rig.load(4, 4), rig.store(4, 5), rig.load(5, 6)]
        assert rig.handler.cancel(first)
        rig.release(hold)
        rig.finish()
        assert [state(job) for job in [first, *chain, *beside]] == [
            "cancelled",
            *["failed"] * 4,
            *["done"] * 3,
        ]
        for source, job in zip([first, *chain], chain, strict=False):
            assert error(job) == reason(source)


@stubbed
def test_failures_follow_the_data_through_queues(driver: Driver) -> None:
    with Rig(driver) as rig:
        hold = rig.held(SIDE)
        rig.store(9, 9, after=Stream(SIDE))
        rig.fill("store", 9, 9)
        first = rig.store(1, 1)
        chain = [rig.load(1, 2), rig.store(2, 2), rig.submit("expedited", [3], [2])]
        assert rig.handler.cancel(first)
        rig.release(hold)
        rig.finish()
        assert [state(job) for job in chain] == ["failed"] * 3


@pytest.mark.parametrize("end", ["failed", "cancelled in the queue"])
@stubbed
def test_what_only_has_its_turn_behind_a_job_does_not_fail_with_it(
    driver: Driver, end: str
) -> None:
    with Rig(driver) as rig:
        store = ENDS[end](rig, "store", 1, 2)
        over_the_page = rig.store(3, 2)
        into_the_block = rig.load(5, 1)
        load = ENDS[end](rig, "load", 7, 8)
        over_the_block = rig.submit("expedited", [7], [9])
        into_the_page = rig.store(10, 8)
        rig.finish()
        for job in (over_the_page, into_the_block, over_the_block, into_the_page):
            assert state(job) == "done"
        assert {state(store), state(load)} <= {"failed", "cancelled"}
        assert rig.is_right(without=[store, load])


@stubbed
def test_a_page_stays_invalid_when_an_older_store_of_it_ends_well(driver: Driver) -> None:
    with Rig(driver) as rig:
        hold = rig.held(SIDE)
        rig.store(1, 2, after=Stream(SIDE))
        rig.fill("store", 9, 9)
        newer = rig.store(3, 2)
        assert rig.handler.cancel(newer)
        rig.release(hold)
        rig.finish()
        job = rig.load(2, 4)
        rig.finish()
        assert state(job) == "failed"
        assert error(job) == f"store {newer.id} was cancelled"


@stubbed
def test_a_failed_store_spoils_nothing_that_a_newer_one_writes(driver: Driver) -> None:
    with Rig(driver) as rig:
        older, newer = rig.store(1, 2), rig.store(3, 2)
        load = rig.load(2, 4)
        assert rig.handler.cancel(older)
        rig.finish()
        assert [state(job) for job in (older, newer, load)] == ["cancelled", "done", "done"]
        assert (rig.block(4) == rig.block(3)).all()


@stubbed
def test_a_store_that_fails_for_its_block_leaves_an_invalid_page(driver: Driver) -> None:
    with Rig(driver) as rig:
        load = fails(rig, "load", 1, 2)
        store = rig.store(1, 3)
        assert state(store) == "failed"
        rig.finish()
        job = rig.load(3, 4)
        assert error(job) == f"store {store.id} failed: {error(store)}"
        assert f"load {load.id} failed" in error(store)


@stubbed
def test_only_the_slots_of_a_page_that_were_to_be_stored_are_invalid(driver: Driver) -> None:
    with Rig(driver, pages=4, per_page=3) as rig:
        before = rig.submit("store", [0, 1], [1])
        driver.fail("cuMemcpyAsync")  # their bytes lie in one piece
        failed = rig.submit("store", [2, 3, 4], [1, 2], first_block=2)
        assert (state(before), state(failed)) == ("open", "failed")
        jobs = {
            "slots 0 and 1 of page 1": rig.submit("load", [8, 9], [1]),
            "slot 2 of page 1": rig.submit("load", [10], [1], first_block=2),
            "slots 0 and 1 of page 2": rig.submit("load", [11, 12], [2]),
            "slot 2 of page 2": rig.submit("load", [13], [2], first_block=2),
            "all of page 1": rig.submit("load", [5, 6, 7], [1]),
        }
        rig.finish()
        assert [state(job) for job in jobs.values()] == [
            "done",
            "failed",
            "failed",
            "done",
            "failed",
        ]
        assert (rig.block(8) == rig.block(0)).all()
        rig.submit("store", [2], [1], first_block=2)
        whole = rig.submit("load", [5, 6, 7], [1])
        rig.finish()
        assert state(whole) == "done"
        assert (rig.block(7) == rig.block(2)).all()


@stubbed
def test_a_job_of_several_blocks_fails_for_one_that_it_cannot_read(driver: Driver) -> None:
    with Rig(driver) as rig:
        rig.submit("store", [0, 2], [0, 2])
        bad = fails(rig, "store", 1, 1)
        job = rig.submit("load", [8, 9, 10], [0, 1, 2])
        rig.finish()
        assert state(job) == "failed"
        assert error(job).startswith(f"store {bad.id} failed")
        store = rig.submit("store", [8, 11], [4, 5])  # the failed load has been reported
        rig.finish()
        assert state(store) == "done"


@stubbed
def test_what_is_invalid_stays_so_when_the_cache_moves(driver: Driver) -> None:
    with Rig(driver) as rig:
        fails(rig, "store", 1, 2)
        rig.handler.rebind(rig.layout)
        assert state(rig.load(2, 3)) == "failed"
        rig.store(1, 2)
        job = rig.load(2, 3)
        rig.finish()
        assert state(job) == "done"


@stubbed
def test_a_block_that_was_not_loaded_stays_so_when_the_cache_moves(driver: Driver) -> None:
    with Rig(driver) as rig:
        load = rig.load(1, 4)
        rig.handler.cancel(load)
        driver.run()
        rig.handler.rebind(rig.layout)
        store = rig.store(4, 2)
        driver.run()
        assert store.done()
        assert error(store) == reason(load)


@stubbed
def test_jobs_end_in_the_order_in_which_they_wait_for_each_other(driver: Driver) -> None:
    with Rig(driver) as rig:
        first = rig.load(2, 1)
        second = rig.store(3, 2)
        driver.run()
        assert [result.job_id for result in rig.handler.finished()] == [first.id, second.id]


@pytest.mark.parametrize("culprit", [0, 7])
@stubbed
def test_a_load_of_pages_of_many_stores_fails_with_the_one_that_failed(
    driver: Driver, culprit: int
) -> None:
    with Rig(driver, pages=32) as rig:
        hold, _ = rig.hold_up("store", 15, 31)
        stores = [rig.submit("store", [i, i + 8], [i, i + 8]) for i in range(8)]
        pages = [*range(16)]  # those of each store come twice, with others between
        well = rig.submit("load", [0, 1], [16, 17])
        load = rig.submit("load", pages, pages)
        rig.handler.cancel(stores[culprit])
        rig.release(hold)
        rig.finish()
        assert state(well) == "done"
        assert error(load) == f"store {stores[culprit].id} was cancelled"
