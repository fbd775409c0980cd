"""Which jobs still use a GPU block, and which stores were computed from a load."""

from __future__ import annotations

import pytest
import torch
from drained import drain
from expecttest import assert_expected_inline
from prefix_bytes import BLOCKS, make
from simulated_driver import Driver, cache, simulated

from torch_kvswap import PagedLayout, PrefixCache


@simulated
def test_reused_blocks_wait_for_their_stores(driver: Driver) -> None:
    driver.set_mode("manual")
    gpu, host = cache(driver)
    with PrefixCache(gpu, host) as prefixes:
        assert prefixes.jobs_using([1, 2]) == []
        first = [prefixes.store(["a", "b", "c"], [1, 2, 3]).job]
        assert prefixes.jobs_using([2]) == first
        assert prefixes.jobs_using([1, -1]) == first
        assert prefixes.jobs_using([4]) == []
        second = prefixes.store(["x", "b"], [1, 4], hold=True).job
        assert second is not None
        assert second.nbytes == gpu.block_bytes
        assert prefixes.jobs_using([1]) == [*first, second]
        assert prefixes.jobs_using([4]) == []  # "b" is on its way from another block
        driver.run()
        assert prefixes.jobs_using([1, 2, 4]) == []
        driver.set_mode("immediate")
    assert [result.ok for result in prefixes.poll()] == [True, True]


@simulated
def test_a_preemption_waits_for_queued_stores(driver: Driver) -> None:
    driver.set_mode("manual")
    with PrefixCache(*cache(driver)) as prefixes:
        store = prefixes.store(["a", "b"], [1, 2]).job
        assert prefixes.store(["a", "b"], [1, 2], hold=True).state == "present"
        assert prefixes.jobs_using([1, 2]) == [store]
        prefixes.store(["a", "b"], [3, 4], hold=True)  # the same contents in other blocks
        assert prefixes.jobs_using([3, 4]) == []
        driver.set_mode("immediate")


@simulated
def test_reused_blocks_wait_for_their_loads(driver: Driver) -> None:
    with PrefixCache(*cache(driver)) as prefixes:
        prefixes.store(["a", "b"], [1, 2])
        prefixes.synchronize()
        prefixes.poll()
        driver.set_mode("manual")
        load = prefixes.load(["a", "b"], [3, 4])
        held = prefixes.store(["a", "b"], [3, 4], hold=True)
        assert held.state == "present"
        assert prefixes.jobs_using([4]) == [load]
        assert prefixes.jobs_using([1]) == []
        driver.set_mode("immediate")
        driver.run()
        assert prefixes.jobs_using([3, 4]) == []


def test_nothing_reads_blocks_of_a_moved_cache() -> None:
    prefixes, _ = make()
    with prefixes:
        prefixes.store(["a"], [1])
        prefixes.rebind(PagedLayout([torch.zeros(2 * BLOCKS, 5), torch.zeros(2 * BLOCKS, 5)]))
        assert prefixes.jobs_using([1, 2 * BLOCKS - 1]) == []
        prefixes.store(["b"], [2 * BLOCKS - 1])
        assert [result.ok for result in prefixes.poll()] == [True, True]


@simulated
@pytest.mark.parametrize("ending", ["failed", "cancelled", "done"])
@pytest.mark.parametrize("hold", [False, True])
def test_what_unloaded_blocks_computed_is_not_found(
    driver: Driver, hold: bool, ending: str
) -> None:
    with PrefixCache(*cache(driver)) as prefixes:
        prefixes.store(["a", "b"], [1, 2])
        prefixes.poll()
        driver.set_mode("manual")
        if ending == "failed":
            driver.fail("cuMemcpyBatchAsync")
        load = prefixes.load(["a", "b"], [5, 6], after=())
        assert load is not None
        if ending == "cancelled":
            assert prefixes.cancel(load)
        # The model has computed "c" behind the load.
        prefixes.store(["a", "b", "c"], [5, 6, 7], hold=hold)
        driver.set_mode("immediate")
        drain(prefixes)
        results = prefixes.poll()
        assert [of.state for of in results if of.direction == "load"] == [ending]
        assert prefixes.lookup(["c"]).found == (ending == "done")
        assert prefixes.lookup(["a", "b"]).ready == (0 if ending == "failed" else 2)
        # What is computed after poll() has said so is stored.
        prefixes.store(["a", "b", "c"], [5, 6, 7], hold=hold)
        prefixes.poll()
        assert prefixes.lookup(["a", "b", "c"]).ready == 3


@simulated
@pytest.mark.parametrize("overtakes", [True, False])
def test_a_store_fails_with_its_load(driver: Driver, overtakes: bool) -> None:
    with PrefixCache(*cache(driver)) as prefixes:
        prefixes.store(["a"], [1])
        prefixes.poll()
        driver.set_mode("manual")
        held = driver.hold(42)
        driver.set_stream(0, 42)
        load = prefixes.load(["a"], [5])
        assert load is not None
        load.wait()
        prefixes.store(["a", "b"], [5, 6], after=() if overtakes else None)
        assert prefixes.cancel(load)
        driver.run()
        results = prefixes.poll()
        driver.release(held)
        driver.set_mode("immediate")
        drain(prefixes)
        results += prefixes.poll()
        order = [("load", "cancelled"), ("store", "failed")]
        assert [(of.direction, of.state) for of in results] == order
        assert_expected_inline(
            str(results[1].error),
            """its blocks were computed from what load 1 should have loaded; when poll() has reported that load, compute them again: load 1 was cancelled""",
        )
        assert prefixes.lookup(["b"]).found == 0


@simulated
def test_blocks_of_a_later_load_are_found(driver: Driver) -> None:
    with PrefixCache(*cache(driver)) as prefixes:
        prefixes.store(["a"], [1])
        prefixes.store(["b"], [2])
        prefixes.poll()
        driver.fail("cuMemcpyBatchAsync")
        prefixes.load(["a"], [5])
        prefixes.load(["b"], [5])
        prefixes.store(["b", "c"], [5, 7])
        drain(prefixes)
        assert [result.state for result in prefixes.poll()] == ["failed", "done", "done"]
        assert prefixes.lookup(["b", "c"]).ready == 2
