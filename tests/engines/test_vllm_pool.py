"""The workers of one engine share one host pool. vLLM need not be installed."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch
from patience import PATIENCE

from torch_kvswap.host_pool.pool import HostPool
from torch_kvswap.integrations.vllm import worker_pools
from torch_kvswap.integrations.vllm.worker_pools import replicated_pool
from torch_kvswap.layout import PagedLayout
from torch_kvswap.offload.handler import OffloadHandler
from torch_kvswap.results import CorruptedPageError


def layout() -> PagedLayout:
    return PagedLayout([torch.zeros(8, 64, dtype=torch.uint8)])


def pools_of_two(
    layouts: Sequence[PagedLayout] = (), **options: Any
) -> tuple[Future[HostPool], Future[HostPool]]:
    """What the two workers of an engine, which are threads, are given."""
    said: Future[Any] = Future()

    def make(rank: int) -> HostPool:
        def broadcast(mine: Any) -> Any:
            if rank == 0:
                said.set_result(mine)
            return said.result(PATIENCE)

        one = layouts[rank] if layouts else layout()
        return replicated_pool(one, 6, 2, rank=rank, world=2, broadcast=broadcast, **options)

    with ThreadPoolExecutor(2) as threads:
        return threads.submit(make, 0), threads.submit(make, 1)


def test_a_worker_loads_what_another_stored():
    """With checksums, by which it notices damage."""
    gpu = [torch.randint(256, (8, 64), dtype=torch.uint8) for _ in range(2)]
    layouts = [PagedLayout([one]) for one in gpu]
    pools = [one.result() for one in pools_of_two(layouts, verify="load")]
    first, second = map(OffloadHandler, layouts, pools)
    first.store(gpu_block_ids=[0, 1, 2, 3], page_ids=[4, 5]).synchronize()
    second.load(page_ids=[4, 5], gpu_block_ids=[7, 6, 5, 4]).synchronize()
    assert torch.equal(gpu[1][[7, 6, 5, 4]], gpu[0][:4])
    pools[0].pages[4, 1, 9] ^= 1
    with pytest.raises(CorruptedPageError, match="GPU block 3, page 4, slot 1"):
        second.load(page_ids=[4, 5], gpu_block_ids=[2, 3, 1, 0]).synchronize()
    for pool in pools:
        pool.close()


def test_a_worker_that_does_not_come_is_missed(monkeypatch):
    monkeypatch.setattr(worker_pools, "_TIMEOUT", 0.05)
    with pytest.raises(TimeoutError, match="1 of the workers have not come for the host pool"):
        replicated_pool(layout(), 6, 2, rank=0, world=2, broadcast=lambda mine: mine)


def test_when_worker_0_fails_others_are_told(monkeypatch):
    has_come, receive = threading.Event(), worker_pools.PoolHandle.receive

    def comes(connection: Any) -> Any:
        has_come.set()
        return receive(connection)

    def fails(*_: object, **__: object) -> None:
        assert has_come.wait(PATIENCE)
        raise RuntimeError("out of memory")

    monkeypatch.setattr(worker_pools.PoolHandle, "receive", comes)
    monkeypatch.setattr(HostPool, "__init__", fails)
    first, other = pools_of_two()
    with pytest.raises(RuntimeError, match="out of memory"):
        first.result()
    with pytest.raises(RuntimeError, match="worker 1 got no host pool, because worker 0"):
        other.result()


def test_another_user_is_given_nothing(monkeypatch):
    own = os.geteuid()
    monkeypatch.setattr(worker_pools, "_TIMEOUT", 2)
    monkeypatch.setattr(os, "geteuid", lambda: own + 1)
    first, other = pools_of_two()
    with pytest.raises(PermissionError, match=f"socket belongs to user {own}, and this process"):
        other.result()
    with pytest.raises(TimeoutError):
        first.result()
