"""An engine knows which stores still read a GPU block, and which stores depend on a load."""

from __future__ import annotations

from array import array
from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from drained import drain
from engine_bytes import BLOCKS, make
from interrupts import Interrupted, Interrupter
from simulated_driver import Driver, cache, simulated

from torch_kvswap import AFTER_NOTHING, OffloadEngine, OffloadHandler, PagedLayout
from torch_kvswap.prefix.open_jobs import OpenJob, OpenJobs


@simulated
@pytest.mark.parametrize("policy", ["eager", "lazy"])
def test_blocks_that_are_reused_wait_for_all_stores_that_read_them(
    driver: Driver, policy: str
) -> None:
    driver.set_mode("manual")
    gpu, host = cache(driver)
    with OffloadHandler(gpu, host) as handler:
        engine = OffloadEngine(handler, store_policy=policy)
        assert engine.evict([1, 2]) == []
        engine.store(["a", "b", "c"], [1, 2, 3])
        first = engine.evict([2])  # lazy: stores what is in front of it, too
        assert [job.nbytes for job in first] == [(3 if policy == "eager" else 2) * gpu.block_bytes]
        assert engine.evict([1, -1]) == first
        assert engine.evict([4]) == []
        held = engine.preempt(["x", "b"], [1, 4])
        assert held is not None
        assert held.jobs[:-1] == first
        assert [job.nbytes for job in held.jobs] == [first[0].nbytes, gpu.block_bytes]
        assert engine.evict([1]) == held.jobs
        assert engine.evict([4]) == []  # "b" is on its way from another block
        driver.run()
        assert engine.evict([1, 2, 4]) == []
        driver.set_mode("immediate")
    assert [result.ok for result in engine.poll()] == [True, True]


@simulated
def test_a_preempted_request_waits_for_a_store_of_its_blocks_that_is_queued(driver: Driver) -> None:
    driver.set_mode("manual")
    gpu, host = cache(driver)
    with OffloadHandler(gpu, host) as handler:
        engine = OffloadEngine(handler)
        store = engine.store(["a", "b"], [1, 2])
        held = engine.preempt(["a", "b"], [1, 2])
        assert held is not None
        assert held.jobs == [store]
        other = engine.preempt(["a", "b"], [3, 4])  # the same contents in other blocks
        assert other is not None
        assert other.jobs == []
        driver.set_mode("immediate")


def add_store(
    open_jobs: OpenJobs, engine: OffloadEngine, blocks: list[int], job: Any = None
) -> OpenJob:
    """A store of these blocks in the only group; without a job it was not submitted."""
    reservation = engine.manager.prepare_store([str(blocks)])
    assert reservation is not None
    entry = OpenJob(engine.manager, reservation, [np.array(blocks)])
    open_jobs.add(entry, [array("q", blocks)])
    entry.job = job
    return entry


def test_a_store_that_has_ended_does_not_hide_an_earlier_one_of_the_same_block() -> None:
    """It can have failed before the earlier one has ended."""
    engine, _ = make()
    jobs = [
        SimpleNamespace(id=number, is_submitted=True, query=lambda: False) for number in range(3)
    ]
    with engine.handler as handler:
        open_jobs = OpenJobs(handler)
        entries = [
            add_store(open_jobs, engine, blocks, job)
            for job, blocks in zip(jobs, ([1, 2], [2, 3], [3]), strict=True)
        ]

        def reading(block: int) -> list[int]:
            return [job.id for job in open_jobs.stores_reading([array("q", [block])])]

        assert [reading(block) for block in range(5)] == [[], [0], [0, 1], [0, 1, 2], []]
        jobs[1].query = lambda: True
        assert [reading(block) for block in (2, 3)] == [[0], [0, 2]]
        jobs[0].query = jobs[2].query = lambda: True
        for entry in (entries[2], entries[0], entries[0]):
            open_jobs.remove(entry)
        jobs[1].query = lambda: False
        assert [reading(block) for block in (1, 2, 3)] == [[], [1], [1]]


def test_a_store_that_was_not_submitted_does_not_hide_an_earlier_one() -> None:
    engine, _ = make()
    job = SimpleNamespace(is_submitted=True, query=lambda: False)
    with engine.handler as handler:
        open_jobs = OpenJobs(handler)
        first = add_store(open_jobs, engine, [1, 2], job)
        open_jobs.undo(add_store(open_jobs, engine, [1, 2]))
        # As if add() was interrupted before it began.
        open_jobs.undo(OpenJob(engine.manager, first.reservation, first.blocks))
        assert open_jobs.stores_reading([array("q", [2])]) == [job]


def test_an_interrupted_undo_does_not_hide_an_earlier_store() -> None:
    engine, _ = make()
    job, interrupter = SimpleNamespace(is_submitted=True, query=lambda: False), Interrupter()
    with engine.handler as handler:
        for at in count(1):
            open_jobs = OpenJobs(handler)
            add_store(open_jobs, engine, [1, 2], job)
            refused = add_store(open_jobs, engine, [1, 2])
            try:
                interrupter.call(at, partial(open_jobs.undo, refused))
            except Interrupted:
                assert open_jobs.stores_reading([array("q", [2])]) == [job]
            else:
                break
    assert at > 1


def test_stores_that_failed_and_are_reported_do_not_hide_an_earlier_one() -> None:
    engine, _ = make()
    jobs: list[Any] = [
        SimpleNamespace(is_submitted=True, query=lambda: False),
        *[SimpleNamespace(is_submitted=True, query=lambda: True)] * 3,
    ]
    with engine.handler as handler:
        open_jobs = OpenJobs(handler)
        entries = [add_store(open_jobs, engine, [1], job) for job in jobs]
        block = [array("q", [1])]
        for failed in (2, 1, 3, 3):  # 3: its poll() was interrupted
            open_jobs.remove(entries[failed])
            assert open_jobs.stores_reading(block) == jobs[:1]
        open_jobs.remove(entries[0])
        assert open_jobs.stores_reading(block) == []
        assert open_jobs._jobs == {}


def test_a_cache_that_has_moved_and_grown_has_blocks_that_nothing_reads() -> None:
    engine, _ = make()
    with engine.handler as handler:
        engine.store(["a"], [1])
        handler.rebind(PagedLayout([torch.zeros(2 * BLOCKS, 5), torch.zeros(2 * BLOCKS, 5)]))
        assert engine.evict([1, 2 * BLOCKS - 1]) == []
        engine.store(["b"], [2 * BLOCKS - 1])
        assert [result.ok for result in engine.poll()] == [True, True]


@simulated
@pytest.mark.parametrize("ending", ["failed", "cancelled", "done"])
@pytest.mark.parametrize("policy", ["eager", "lazy", "preempt"])
def test_what_was_computed_from_blocks_that_were_not_loaded_is_not_found(
    driver: Driver, policy: str, ending: str
) -> None:
    gpu, host = cache(driver)
    with OffloadHandler(gpu, host) as handler:
        engine = OffloadEngine(handler, store_policy="lazy" if policy == "lazy" else "eager")
        engine.preempt(["a", "b"], [1, 2])
        engine.poll()
        driver.set_mode("manual")
        if ending == "failed":
            driver.fail("cuMemcpyBatchAsync")
        load = engine.load(["a", "b"], [5, 6], after=AFTER_NOTHING)
        assert load is not None
        if ending == "cancelled":
            assert handler.cancel(load)
        # The model has computed "c" behind the load.
        call = engine.preempt if policy == "preempt" else engine.store
        call(["a", "b", "c"], [5, 6, 7])
        if policy == "lazy":
            engine.evict([7])
        driver.set_mode("immediate")
        drain(handler)
        results = engine.poll()
        assert [of.state for of in results if of.direction == "load"] == [ending]
        assert engine.lookup(["c"]).found == (ending == "done")
        assert engine.lookup(["a", "b"]).ready == (0 if ending == "failed" else 2)
        if policy == "lazy":
            assert engine.evict([5, 6, 7]) == []  # what is in these blocks has no key any more
        # What is computed after poll() has said so is stored.
        call(["a", "b", "c"], [5, 6, 7])
        engine.evict([5, 6, 7])
        engine.poll()
        assert engine.lookup(["a", "b", "c"]).ready == 3


@simulated
@pytest.mark.parametrize("overtakes", [True, False])
def test_only_a_store_that_was_reported_before_a_load_that_failed_stays(
    driver: Driver, overtakes: bool
) -> None:
    gpu, host = cache(driver)
    with OffloadHandler(gpu, host) as handler:
        engine = OffloadEngine(handler)
        engine.store(["a"], [1])
        engine.poll()
        driver.set_mode("manual")
        held = driver.hold(42)
        driver.set_stream(0, 42)
        load = engine.load(["a"], [5])
        assert load is not None
        load.wait()
        engine.store(["a", "b"], [5, 6], after=AFTER_NOTHING if overtakes else None)
        assert handler.cancel(load)
        driver.run()
        results = engine.poll()
        driver.release(held)
        driver.set_mode("immediate")
        drain(handler)
        results += engine.poll()
        order = [("load", "cancelled"), ("store", "done")]
        if overtakes:
            order.reverse()
        assert [(of.direction, of.state) for of in results] == order
        assert engine.lookup(["b"]).found == overtakes


@simulated
def test_blocks_recorded_before_their_load_failed_are_not_stored_later(driver: Driver) -> None:
    gpu, host = cache(driver)
    with OffloadHandler(gpu, host) as handler:
        engine = OffloadEngine(handler, store_policy="lazy")
        engine.preempt(["a", "b"], [1, 2])
        engine.poll()
        driver.fail("cuMemcpyBatchAsync")
        engine.load(["a", "b"], [5, 6])
        engine.store(["a", "b", "c"], [5, 6, 7])
        engine.store(["other"], [8])
        drain(handler)
        assert [result.state for result in engine.poll()] == ["failed"]
        assert engine.evict([5, 6, 7]) == []
        assert len(engine.evict([8])) == 1
        engine.poll()
        assert [engine.lookup([key]).found for key in ("a", "b", "c", "other")] == [0, 0, 0, 1]


@simulated
def test_blocks_that_leave_one_by_one_behind_a_load_that_failed_are_not_found(
    driver: Driver,
) -> None:
    gpu, host = cache(driver)
    with OffloadHandler(gpu, host) as handler:
        engine = OffloadEngine(handler, store_policy="lazy")
        engine.preempt(["a", "kept"], [1, 2])
        engine.poll()
        driver.fail("cuMemcpyBatchAsync")
        engine.load(["a"], [5])
        engine.store(["a", "b", "c"], [5, 6, 7])
        engine.store(["other"], [8])
        assert [len(engine.evict([block])) for block in (5, 6, 7, 8)] == [0, 1, 1, 1]
        engine.load(["kept"], [7])  # which is reused
        drain(handler)
        results = engine.poll()
        assert [result.state for result in results] == ["failed", "done", "done", "done", "done"]
        found = [engine.lookup([key]).found for key in ("a", "b", "c", "other", "kept")]
        assert found == [0, 0, 0, 1, 1]


@simulated
def test_blocks_that_a_later_load_has_filled_are_found(driver: Driver) -> None:
    gpu, host = cache(driver)
    with OffloadHandler(gpu, host) as handler:
        engine = OffloadEngine(handler)
        engine.store(["a"], [1])
        engine.store(["b"], [2])
        engine.poll()
        driver.fail("cuMemcpyBatchAsync")
        engine.load(["a"], [5])
        engine.load(["b"], [5])
        engine.store(["b", "c"], [5, 7])
        drain(handler)
        assert [result.state for result in engine.poll()] == ["failed", "done", "done"]
        assert engine.lookup(["b", "c"]).ready == 2
