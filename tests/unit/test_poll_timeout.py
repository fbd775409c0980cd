"""poll(timeout) waits for a job to end."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from error_text import error_text
from patience import PATIENCE
from prefix_bytes import make
from simulated_driver import Driver, cache, simulated

from torch_kvswap import HostPool, OffloadHandler, PagedLayout, PrefixCache


@simulated
@pytest.mark.parametrize("timeout", [PATIENCE, None])
@pytest.mark.parametrize("kind", [OffloadHandler, PrefixCache])
def test_it_returns_when_a_job_has_ended(
    driver: Driver, timeout: float | None, kind: type[OffloadHandler | PrefixCache]
) -> None:
    driver.set_mode("manual")
    with kind(*cache(driver)) as calls:
        if isinstance(calls, PrefixCache):
            calls.store(["a"], [1])
        else:
            calls.store(gpu_block_ids=[1], page_ids=[1])
        assert calls.poll(0.02) == []
        results: list[object] = []
        waiting = threading.Thread(target=lambda: results.extend(calls.poll(timeout)))
        waiting.start()
        driver.run()
        waiting.join(PATIENCE)
        assert len(results) == 1
        assert not isinstance(calls, PrefixCache) or calls.lookup(["a"]).ready == 1
        driver.set_mode("immediate")


@simulated
def test_a_job_ending_early_is_returned(driver: Driver) -> None:
    driver.set_mode("manual")
    gpu, host = cache(driver)
    with OffloadHandler(gpu, host) as handler:
        handler.store(gpu_block_ids=[1], page_ids=[1])
        load = handler.load(page_ids=[2], gpu_block_ids=[2])
        assert handler.cancel(load) is True
        driver.fail("cuMemcpyBatchAsync")
        failed = handler.load(page_ids=[3], gpu_block_ids=[3])
        assert failed.id in [result.job_id for result in handler.poll(PATIENCE)]
        driver.set_mode("immediate")


def test_it_returns_at_once_with_results() -> None:
    layout = PagedLayout([torch.zeros(4, 4)])
    with OffloadHandler(layout, HostPool(layout, 4)) as handler:
        assert handler.poll(None) == []
        handler.store(gpu_block_ids=[1], page_ids=[1])
        assert len(handler.poll(None)) == 1
        handler.store(gpu_block_ids=[1], page_ids=[1])
    assert len(handler.poll(None)) == 1  # closed
    assert handler.poll(None) == []


def test_a_wrong_timeout_is_always_refused() -> None:
    prefixes, _ = make()
    with prefixes:
        prefixes.store(["a"], [1])
        assert [error_text(prefixes.poll, value) for value in (-1, "1", float("nan"))] == [
            "ValueError: timeout is -1.0; it must be 0 seconds or more",
            "TypeError: timeout is a str; it must be a number of seconds",
            "ValueError: timeout is nan; it must be 0 seconds or more",
        ]
        began = time.monotonic()
        assert len(prefixes.poll(PATIENCE)) == 1
        assert time.monotonic() - began < PATIENCE
