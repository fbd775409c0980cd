"""Cancelling a queued job keeps the order of the other jobs."""

from __future__ import annotations

import pytest
import torch
from simulated_cache import let_threads_look
from simulated_driver import cache, simulated
from simulated_driver.handles import Stream

IN_FLIGHT = 64


@pytest.mark.parametrize("cancels", [True, False])
@simulated
def test_a_store_behind_a_cancelled_one_still_waits_for_the_load_into_its_block(driver, cancels):
    from torch_kvswap.offload.handler import OffloadHandler

    driver.set_mode("manual")
    driver.set_stream(0, 42)
    layout, host = cache(driver)
    host.pages[9] = 77
    handler = OffloadHandler(layout, host)
    of_stores, of_loads = driver.hold(42), driver.hold(43)
    for _ in range(IN_FLIGHT):
        handler.store(gpu_block_ids=[0], page_ids=[0])
        handler.load(page_ids=[1], gpu_block_ids=[1], after=Stream(43))
    # In the queues, since no more may be in flight.
    cancelled = handler.store(gpu_block_ids=[2], page_ids=[2], after=())
    handler.load(page_ids=[9], gpu_block_ids=[9], after=())
    store = handler.store(gpu_block_ids=[9], page_ids=[8], after=())
    if cancels:
        assert handler.cancel(cancelled)
    driver.release(of_stores)
    for _ in range(3):  # in which the worker thread may enqueue the store
        driver.run()
        handler.poll()
        let_threads_look(driver)
    early = store.query()
    driver.release(of_loads)
    driver.set_mode("immediate")
    handler.close()
    assert not early
    assert torch.equal(host.pages[8], host.pages[9])
