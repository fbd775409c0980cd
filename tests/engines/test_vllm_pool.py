"""The workers of one engine share one host pool. vLLM need not be installed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from patience import PATIENCE

from torch_kvswap.host_pool.pool import HostPool
from torch_kvswap.integrations.vllm.worker_pools import replicated_pool
from torch_kvswap.layout import PagedLayout
from torch_kvswap.offload.handler import OffloadHandler
from torch_kvswap.results import CorruptedPageError


def pools_of_two(layouts: Sequence[PagedLayout]) -> list[Callable[[], HostPool]]:
    """What the two workers of an engine, which are threads, are given."""
    said: Future[Any] = Future()
    both = threading.Barrier(2, timeout=PATIENCE)

    def make(rank: int) -> HostPool:
        def broadcast(mine: Any = None) -> Any:
            if rank == 0:
                said.set_result(mine)
            return said.result(PATIENCE)

        group = SimpleNamespace(rank_in_group=rank, broadcast_object=broadcast, barrier=both.wait)
        options = {"encoding": "raw", "verify": "load", "pin_in_background": False}
        return replicated_pool(layouts[rank], 6, 2, group=group, **options)

    with ThreadPoolExecutor(2) as threads:
        return [threads.submit(make, rank).result for rank in range(2)]


def test_a_worker_loads_what_another_stored():
    """With checksums, by which it notices damage."""
    gpu = [torch.randint(256, (8, 64), dtype=torch.uint8) for _ in range(2)]
    layouts = [PagedLayout([one]) for one in gpu]
    pools = [result() for result in pools_of_two(layouts)]
    first, second = map(OffloadHandler, layouts, pools)
    first.store(gpu_block_ids=[0, 1, 2, 3], page_ids=[4, 5]).synchronize()
    second.load(page_ids=[4, 5], gpu_block_ids=[7, 6, 5, 4]).synchronize()
    assert torch.equal(gpu[1][[7, 6, 5, 4]], gpu[0][:4])
    pools[0].pages[4, 1, 9] ^= 1
    with pytest.raises(CorruptedPageError, match="GPU block 3, page 4, slot 1"):
        second.load(page_ids=[4, 5], gpu_block_ids=[2, 3, 1, 0]).synchronize()
    for pool in pools:
        pool.close()


def test_when_worker_0_fails_others_are_told():
    first, other = pools_of_two([None, PagedLayout([torch.zeros(8, 64)])])
    with pytest.raises(TypeError, match="layout is None"):
        first()
    with pytest.raises(RuntimeError, match="worker 1 got no host pool, because worker 0"):
        other()


def test_a_worker_that_fails_holds_up_no_other():
    layouts = [PagedLayout([torch.zeros(8, size, dtype=torch.uint8)]) for size in (64, 32)]
    first, other = pools_of_two(layouts)
    with pytest.raises(ValueError, match="the handle is for other pages"):
        other()
    first().close()
