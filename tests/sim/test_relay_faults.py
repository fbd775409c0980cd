"""What goes wrong with a relay while copies run on the cache's GPU."""

from __future__ import annotations

import gc
import random
import tempfile
import threading
from contextlib import suppress
from typing import Any

import pytest
import torch
from below_engine import key_of
from logged import logged
from patience import in_time
from relayed import BLOCKS, FRAGMENT, LARGE, LAYERS, RelayedCache, gain_of
from served_engine import PAGE_BYTES, serving
from simulated_cache import needs_kernels
from simulated_driver import Driver, on_device, simulated
from staged_bytes import numbers

from torch_kvswap import DeviceLostError, HostPool, Job, OffloadHandler, PrefixCache

KINDS = pytest.mark.parametrize("kind", ["store", "load"])


def close(*closed: OffloadHandler | HostPool) -> None:
    for each in closed:
        with suppress(RuntimeError):  # GPU 0 waits for the relay for ever: memory stays
            each.close()


@pytest.mark.parametrize("lost", ["relay", "control"])
@KINDS
@needs_kernels
@simulated
def test_a_pool_outlives_copies_beside_a_lost_relay(driver: Driver, kind: str, lost: str) -> None:
    """The control loses both GPUs: then no copy runs."""
    with logged():  # that the pool stays locked
        cache = RelayedCache(driver)
        driver.set_link(0, slowness=0)  # the own part of the job is still to come
        job = cache.submit(kind, LARGE, LARGE)
        driver.run()
        driver.lose(719, device=1) if lost == "relay" else driver.lose(719)
        in_time(job.query, 1)
        pending = driver.pending()
        close(cache.handler, cache.pool)
        assert driver.violations() == 0, f"the pool was freed with copies pending: {len(pending)}"
        assert not pending or lost == "relay"
        del cache, job
        gc.collect()


@needs_kernels
@simulated
def test_pages_beside_a_lost_relay_go_to_no_engine(driver: Driver) -> None:
    """Until the engine is closed, and its copies have ended."""
    wholes = [numbers(LAYERS, BLOCKS, FRAGMENT) for _ in range(2)]
    layouts = [on_device(driver, whole) for whole in wholes]
    keys = [[key_of((engine, number)) for number in LARGE] for engine in range(2)]
    memory = len(LARGE) * HostPool.page_bytes_of(layouts[0])
    with tempfile.TemporaryDirectory() as folder, logged() as messages:
        path = f"{folder}/pages"
        with serving(path, memory // PAGE_BYTES + 1), gain_of(2.0):
            options: Any = {"copy_method": "staged", "staging_bytes": 1 << 20, "relays": (1,)}
            lost = PrefixCache.connect(path, layouts[0], model="m", **options)
            other = PrefixCache.connect(path, layouts[1], model="m")
            driver.set_mode("manual")
            driver.set_link(0, slowness=0)  # the own part of the job is still to come
            store = lost.store(keys[0], LARGE, after=()).job
            assert store is not None
            driver.run()
            driver.lose(719, device=1)
            assert in_time(store.query)
            assert [type(result.error) for result in lost.poll()] == [DeviceLostError]
            assert other.lookup(keys[0]).pending == 0
            assert any("may still write 32 pages" in message for message in messages)
            assert other.store(keys[1], LARGE, after=()).state == "full"
            driver.set_link(0, slowness=1)
            driver.set_mode("immediate")
            lost.close()
            kept = wholes[1].clone()
            assert other.store(keys[1], LARGE, after=()).state == "storing"
            other.synchronize()
            other.poll()
            wholes[1].zero_()
            assert other.load(keys[1], LARGE, after=()) is not None
            other.synchronize()
            assert torch.equal(wholes[1][:, LARGE], kept[:, LARGE])
            other.close()


@pytest.mark.parametrize("events_happen", [False, True], ids=["", "control"])
@KINDS
@needs_kernels
@simulated
def test_a_relay_is_lost_while_a_failed_job_ends(
    driver: Driver, kind: str, events_happen: bool
) -> None:
    with RelayedCache(driver) as cache:
        driver.set_link(1, slowness=0)
        driver.fail("cuLaunchKernel", 12)  # behind the first relayed pieces
        before, asks = driver.calls("cuStreamSynchronize"), driver.calls("cuStreamQuery")
        jobs: list[Job] = []
        thread = threading.Thread(target=lambda: jobs.append(cache.submit(kind, LARGE, LARGE)))
        thread.start()
        in_time(
            lambda: (
                driver.calls("cuStreamSynchronize") > before
                or driver.calls("cuStreamQuery") > asks + 100
            )
        )
        driver.lose(719, device=1, events_happen=events_happen)
        thread.join(5)
        assert not thread.is_alive(), driver.pending()
        in_time(jobs[0].query)
        assert isinstance(jobs[0].result.error, DeviceLostError)


@pytest.mark.parametrize("nth", [3, 4])  # the streams of loads, behind those of stores
@needs_kernels
@simulated
def test_a_relay_is_used_in_both_directions_or_none(driver: Driver, nth: int) -> None:
    with RelayedCache(driver):  # the first handler of a process loads kernels on one more stream
        pass
    before = driver.calls("cuStreamCreateWithPriority")
    with RelayedCache(driver):
        made = driver.calls("cuStreamCreateWithPriority") - before
    driver.fail("cuStreamCreateWithPriority", made - 4 + nth)
    with logged() as messages, RelayedCache(driver) as cache:
        metrics = cache.handler.metrics()
        used = list(metrics.stores.relayed_bytes), list(metrics.loads.relayed_bytes)
        assert used == ([], []), f"{used}, {messages}"


@pytest.mark.parametrize("events_happen", [True, False])
@KINDS
@needs_kernels
@simulated
def test_a_job_that_ends_well_beside_a_loss_is_whole(
    driver: Driver, kind: str, events_happen: bool
) -> None:
    damaged = 0
    for seed in range(5):
        chance = random.Random(seed)
        driver.reset()
        # Warnings: a pool of a round before stays locked.
        with logged():
            cache = RelayedCache(driver, relays=chance.choice([(1,), (1, 2)]))
            driver.set_mode("threaded", seed)
            # In the first round no relayed byte arrives.
            driver.set_link(1, slowness=chance.choice((1, 8, 32)) if seed else 0)
            moves, jobs = [range(first, first + 8) for first in range(0, BLOCKS, 8)], []
            lost_after = chance.randrange(1, len(moves))
            for number, ids in enumerate(moves):
                if number == lost_after:
                    driver.lose(719, device=1, events_happen=events_happen)
                with suppress(DeviceLostError):
                    jobs.append((cache.submit(kind, ids, ids), list(ids)))
            close(cache.handler)
            for job, ids in jobs:
                assert job.result is not None
                blocks, pages = cache.whole[:, ids].transpose(0, 1), cache.pages[ids]
                is_whole = torch.equal(blocks, pages)
                assert is_whole or not job.result.ok
                damaged += not is_whole
            del cache, job, jobs
            gc.collect()
    assert damaged > 0  # or there was nothing to notice


@pytest.mark.parametrize("slow", [0, 1], ids=["own link", "relay"])
@pytest.mark.parametrize("relays", [(1,), (1, 2)], ids=str)
@pytest.mark.parametrize("first", [4, 7])
@needs_kernels
@simulated
def test_a_ring_waits_for_all_links(
    driver: Driver, slow: int, relays: tuple[int, ...], first: int
) -> None:
    """Large pieces are packed where several small ones were, which leave over different links."""
    with RelayedCache(driver, relays=relays, staging_bytes=4 << 20) as cache:
        driver.set_link(slow, slowness=0)
        jobs = [cache.store(range(first), range(first)), cache.store(range(8, 40), range(8, 40))]
        driver.run()
        driver.set_link(slow, slowness=1)
        cache.finish(*jobs)
        assert cache.is_right()
