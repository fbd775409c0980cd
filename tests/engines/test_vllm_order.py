"""Order of vLLM's steps and our copies on the simulated driver. vLLM need not be installed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from host_pools import unpinned
from patience import PATIENCE
from pinning_steps import PinningSteps
from simulated_cache import CURRENT, run_until
from simulated_driver import Driver, place, simulated
from vllm_contract import KVSwapWorker, caches, common, submit, worker_module

from torch_kvswap.host_pool import pinning
from torch_kvswap.host_pool.pool import HostPool
from torch_kvswap.integrations.vllm.options import SpecOptions
from torch_kvswap.layout import PagedLayout

BLOCK, PAGE = 3, 5
NONE = caches([[]], [], "cpu")  # instead of the cache on the simulated GPU


@contextlib.contextmanager
def worker_of(driver: Driver) -> Iterator[tuple[Any, torch.Tensor]]:
    """A worker of one group on the simulated GPU, which does nothing until it is told to, and
    the cache."""
    torch.set_num_threads(1)
    driver.set_mode("manual")
    driver.set_stream(0, CURRENT)
    cache = torch.randint(256, (16, 64), dtype=torch.uint8)
    layout = place(driver, PagedLayout([cache]))

    def pageable(*shape: Any, **encoding: Any) -> HostPool:
        made = unpinned(*shape, **encoding)
        driver.adopt(made.pages, 1)
        return made

    with mock.patch.object(worker_module, "group_layouts", return_value=[layout]):
        worker = KVSwapWorker(NONE, 16, 1, SpecOptions(1), [[]], make_pool=pageable)
    worker._pool.pages.random_(256)
    try:
        yield worker, cache
    finally:
        driver.set_mode("immediate")
        worker.shutdown()


def ended(driver: Driver, worker: Any, number: int) -> None:
    results: list[Any] = []

    def is_over() -> bool:
        results.extend(worker.get_finished())
        return bool(results)

    run_until(driver, is_over)
    assert [(one.job_id, one.success) for one in results] == [(number, True)]


def zero(driver: Driver, cache: torch.Tensor) -> torch.Tensor:
    """What vLLM launches for new blocks at the beginning of a step."""
    zeros = driver.memory(64, 2)
    driver.cuda.copy(cache[BLOCK], zeros, CURRENT)
    return zeros


@pytest.mark.parametrize("waits", [True, False], ids=["waits", "control"])
@simulated
def test_a_load_lands_behind_its_steps_zeroing(driver: Driver, waits: bool) -> None:
    with worker_of(driver) as (worker, cache):
        expected, load = worker._pool.pages[PAGE, 0].clone(), worker._handler.load
        if not waits:
            worker._handler.load = lambda *ids, **options: load(*ids, **options, after=())
        worker.get_finished()  # the step before ends here
        hold = driver.hold(CURRENT)
        zeros = zero(driver, cache)
        submit(worker, 1, "load", [BLOCK], common.CPULoadStoreSpec([PAGE]))
        before = cache[BLOCK].clone()
        driver.run()
        assert torch.equal(cache[BLOCK], before if waits else expected), "nothing has been zeroed"
        if waits:
            driver.release(hold)
        ended(driver, worker, 1)
        driver.release(hold)
        driver.run()
        assert torch.equal(cache[BLOCK], expected if waits else zeros)


@simulated
def test_a_transfer_waits_until_its_pages_are_pinned(driver: Driver) -> None:
    """pin_in_background: the scheduler assigns pages, and does not know which are pinned."""
    steps, asked, mib = PinningSteps(), [], 1 << 20
    cache = torch.randint(256, (2, mib), dtype=torch.uint8)
    layout = place(driver, PagedLayout([cache]))

    wait_ready = HostPool.wait_ready

    def wait(pool: HostPool, timeout: float | None = None, pages: int | None = None) -> bool:
        asked.append((timeout, pages))
        steps.pin_more(3)
        return wait_ready(pool, PATIENCE, pages)

    with (
        mock.patch.object(worker_module, "group_layouts", return_value=[layout]),
        mock.patch.object(pinning, "CHUNK_BYTES", 32 * mib),
        mock.patch.object(HostPool, "wait_ready", wait),
    ):
        worker = KVSwapWorker(NONE, 96, 1, SpecOptions(1, pin_in_background=True), [[]])
        assert not worker._pool.is_ready
        for number, (page, block) in enumerate(((95, 0), (0, 1))):
            submit(worker, number, "store", [block], common.CPULoadStoreSpec([page]))
        worker.wait({0, 1})
        assert asked == [(None, 96)], "afterwards all are pinned"
        assert torch.equal(worker._pool.pages[[95, 0], 0], cache)
        worker.shutdown()
