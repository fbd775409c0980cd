"""A job fails if and only if the data that it reads was never written."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from drained import drain
from simulated_cache import SimulatedCache, run_until
from simulated_driver import Driver, cache, simulated

from torch_kvswap.offload.handler import Job, OffloadHandler


def state(job: Job) -> str:
    return "open" if job.result is None else job.result.state


def error(job: Job) -> str:
    assert job.result is not None
    return str(job.result.error)


def reason(source: Job) -> str:
    """What the error of a job says of a job whose output it needs."""
    how = "was cancelled" if state(source) == "cancelled" else f"failed: {error(source)}"
    return f"{source.direction} {source.id} {how}"


def invalid_page(page: int, source: Job, at: int = 0) -> str:
    return f"page {page} (page_ids[{at}]) must be stored again: {reason(source)}"


def invalid_block(block: int, source: Job, at: int = 0) -> str:
    return (
        f"GPU block {block} (gpu_block_ids[{at}]) must be loaded again, or computed once poll() "
        f"has reported the load: {reason(source)}"
    )


def fails(sim: SimulatedCache, kind: str, block: int, page: int) -> Job:
    sim.driver.fail("cuMemcpyAsync")
    return sim.submit(kind, [block], [page])


def is_cancelled_in_the_queue(sim: SimulatedCache, kind: str, block: int, page: int) -> Job:
    sim.fill(kind, 15, 15)
    job = sim.submit(kind, [block], [page])
    assert sim.handler.cancel(job)
    assert job.query()
    return job


def is_cancelled_while_it_runs(sim: SimulatedCache, kind: str, block: int, page: int) -> Job:
    job = sim.submit(kind, [block], [page])
    assert sim.handler.cancel(job)
    assert not job.query()
    return job


ENDS: dict[str, Callable[[SimulatedCache, str, int, int], Job]] = {
    "failed": fails,
    "cancelled in the queue": is_cancelled_in_the_queue,
    "cancelled while it runs": is_cancelled_while_it_runs,
}
REPORTED = pytest.mark.parametrize("reported", [False, True], ids=["unreported", "reported"])


@REPORTED
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("kind", ["load", "expedited"])
@simulated
def test_a_load_of_an_unstored_page_fails(
    driver: Driver, kind: str, end: str, reported: bool
) -> None:
    with SimulatedCache(driver) as sim:
        store = ENDS[end](sim, "store", 1, 2)
        if reported:
            sim.finish()
        load, other = sim.submit(kind, [3], [2]), sim.submit(kind, [4], [5])
        kept = sim.block(3)
        sim.finish()
        assert (state(load), state(other)) == ("failed", "done")
        assert error(load).startswith(invalid_page(2, store))
        if end != "cancelled while it runs" or reported:
            assert (sim.block(3) == kept).all()
        again = sim.submit(kind, [3], [2])
        sim.finish()
        assert state(again) == "failed"
        sim.store(6, 2)
        valid = sim.submit(kind, [7], [2])
        sim.finish()
        assert state(valid) == "done"
        assert (sim.block(7) == sim.block(6)).all()


@pytest.mark.parametrize("kind", ["load", "expedited"])
@pytest.mark.parametrize("end", ENDS)
@simulated
def test_a_store_of_an_unloaded_block_fails(driver: Driver, end: str, kind: str) -> None:
    with SimulatedCache(driver) as sim:
        load = ENDS[end](sim, kind, 1, 2)
        store, other = sim.store(1, 3), sim.store(4, 5)
        run_until(driver, sim.has_ended)
        later = sim.store(1, 6)
        assert [state(job) for job in (store, other, later)] == ["failed", "done", "failed"]
        for job in (store, later):
            assert error(job).startswith(invalid_block(1, load))
        sim.finish()
        valid = sim.store(1, 3)
        sim.finish()
        assert state(valid) == "done"
        assert sim.holds(3, sim.block(1))


@simulated
def test_errors_of_long_chains_stay_short(driver: Driver) -> None:
    with SimulatedCache(driver) as sim:
        first = fails(sim, "store", 1, 1)
        for _ in range(100):  # the pages stay invalid, although all is polled
            load = sim.load(1, 2)
            store = sim.store(2, 1)
            sim.finish()
        assert error(load).startswith("page 1 (page_ids[0]) must be stored again: store ")
        assert error(store).startswith("GPU block 2 (gpu_block_ids[0]) must be loaded again")
        for job in (load, store):
            assert error(job).endswith(reason(first))
            assert len(error(job)) < 2000


@simulated
def test_invalid_pages_stay_so_after_rebind(driver: Driver) -> None:
    with SimulatedCache(driver) as sim:
        fails(sim, "store", 1, 2)
        sim.handler.rebind(sim.layout)
        assert state(sim.load(2, 3)) == "failed"
        sim.store(1, 2)
        job = sim.load(2, 3)
        sim.finish()
        assert state(job) == "done"


@simulated
def test_unloaded_blocks_stay_so_after_rebind(driver: Driver) -> None:
    with SimulatedCache(driver) as sim:
        load = sim.load(1, 4)
        sim.handler.cancel(load)
        driver.run()
        sim.handler.rebind(sim.layout)
        store = sim.store(4, 2)
        driver.run()
        assert store.query()
        assert error(store) == invalid_block(4, load)


# Which jobs use a block


def using(sim: SimulatedCache, *blocks: int) -> list[Job]:
    return sim.handler.jobs_using(blocks)


@simulated
def test_jobs_using_a_block_have_not_ended(driver: Driver) -> None:
    with SimulatedCache(driver) as sim:
        store, load = sim.submit("store", [1, 2], [1, 2]), sim.submit("load", [3, 4], [3, 4])
        overtaking = sim.submit("expedited", [4], [5])
        assert using(sim, 0, -1) == []
        assert using(sim, 2) == [store]
        assert using(sim, 4) == [load, overtaking]
        assert using(sim, 4, 1, 1) == [store, load, overtaking]
        (found,) = using(sim, 1)
        assert found is not store
        assert (found.id, found.direction, found.nbytes) == (0, "store", store.nbytes)
        assert hash(found) == hash(store)
        assert found not in (load, None, 0)
        sim.finish()
        assert using(sim, *range(8)) == []
        assert found.result == store.result


@simulated
def test_an_ended_store_hides_no_earlier_one(driver: Driver) -> None:
    """It can have failed before the earlier one has ended, and be reported before it."""
    with SimulatedCache(driver) as sim:
        sim.fill("store", 15, 15)
        pairs = ([1, 2], [2, 3], [3, 4])
        jobs = [sim.submit("store", blocks, [2 * i, 2 * i + 1]) for i, blocks in enumerate(pairs)]
        assert [using(sim, block) for block in range(5)] == [
            [],
            jobs[:1],
            jobs[:2],
            jobs[1:],
            jobs[2:],
        ]
        for number, of_2, of_3 in ((1, jobs[:1], jobs[2:]), (2, jobs[:1], [])):
            assert sim.handler.cancel(jobs[number])
            assert [using(sim, 2), using(sim, 3)] == [of_2, of_3]
            sim.handler.poll()
            assert [using(sim, 2), using(sim, 3)] == [of_2, of_3]
        sim.finish()
        assert using(sim, 2, 3) == []


@simulated
def test_jobs_of_a_missing_block_are_refused(driver: Driver) -> None:
    with SimulatedCache(driver, blocks=16) as sim:
        for block in (16, -2):
            with pytest.raises(IndexError, match=rf"gpu_block_ids\[1\] is {block}; there are 16"):
                using(sim, 1, block)


@simulated
def test_groups_of_one_memory_share_block_jobs(driver: Driver) -> None:
    driver.set_mode("manual")
    (gpu, host), (other_gpu, other_host) = cache(driver), cache(driver)
    hosts = [host, other_host, cache(driver)[1]]
    with OffloadHandler([gpu, other_gpu, gpu], hosts) as handler:
        store = handler.store(gpu_block_ids=[[1], [2], []], page_ids=[[0], [0], []])
        asked = [handler.jobs_using(blocks) for blocks in ([[1], [], []], [[], [], [1]])]
        assert asked == [[store], [store]]
        assert handler.jobs_using([[2], [1], [2]]) == []
        driver.set_mode("immediate")
        drain(handler)


@simulated
def test_a_page_that_the_caller_wrote_is_loaded(driver: Driver) -> None:
    with SimulatedCache(driver, per_page=2) as sim:
        store = fails(sim, "store", 1, 2)
        sim.finish()
        assert state(store) == "failed"
        sim.host.pages[2, 0] = 7
        refused = sim.load(2, 3)
        sim.handler.mark_written([2])
        load = sim.load(2, 4)
        sim.finish()
        assert (state(refused), state(load)) == ("failed", "done")
        assert (sim.block(4) == 7).all()


@simulated
def test_a_page_being_stored_is_not_marked(driver: Driver) -> None:
    with SimulatedCache(driver) as sim:
        failed = fails(sim, "store", 1, 2)
        sim.finish()
        hold, running = sim.hold_up("store", 1, 3)
        for pages, error in (([2, 3], ValueError), ([2, 99], IndexError)):
            with pytest.raises(error, match=r"page 3 is being written by store 1|page_ids\[1\]"):
                sim.handler.mark_written(pages)
        load = sim.load(2, 4)
        sim.release(hold)
        sim.finish()
        assert [state(job) for job in (failed, running, load)] == ["failed", "done", "failed"]
