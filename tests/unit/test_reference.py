"""The reference handler on the CPU: what an OffloadHandler leaves, of which fuzz.py has a model."""

from __future__ import annotations

import gc
import random
import weakref
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from fuzz_cache import make_groups, make_pools, random_shapes
from fuzz_devices import Device, Gpu

import torch_kvswap.reference
from torch_kvswap import HostPool, OffloadHandler, PagedLayout, Result, TransferError
from torch_kvswap.reference import ReferenceHandler
from torch_kvswap.results import DeviceLostError

BLOCKS, PAGES, PER_PAGE = 8, 5, 2


def make(kind: Any = ReferenceHandler) -> Any:
    rows = [torch.arange(BLOCKS * size, dtype=torch.int16).view(BLOCKS, size) for size in (6, 3)]
    layout = PagedLayout(rows)
    return kind(layout, HostPool(layout, PAGES, PER_PAGE))


def job_of(handler: Any) -> Any:
    return handler.store(gpu_block_ids=[1], page_ids=[0])


def without_times(results: list[Result]) -> list[Result]:
    return [replace(one, submit_seconds=0, queue_seconds=0, copy_seconds=0) for one in results]


def test_jobs_and_results_equal_an_offload_handlers() -> None:
    seen = []
    for kind in (OffloadHandler, ReferenceHandler):
        with make(kind) as handler:
            jobs = [
                handler.store(gpu_block_ids=[1, 5, 2], page_ids=[4, 0], first_slot=1, tag="a"),
                handler.load(page_ids=np.array([4]), gpu_block_ids=torch.tensor([7])),
                handler.load(page_ids=[], gpu_block_ids=[], first_slot=1),
            ]
            handler.synchronize(jobs)
            results = handler.poll()
            assert results == [job.result for job in jobs]
            assert all(result.copy_seconds >= 0 for result in results)
            assert handler.poll() == []
            tags = [result.tag for result in results]
            of_jobs = [(job.id, job.direction, job.nbytes, job.tag) for job in jobs]
            seen.append((without_times(results), tags, of_jobs))
    assert seen[0] == seen[1]


def bytes_left_by(kind: Any, device: Device, seed: int) -> list[torch.Tensor]:
    """By a store of three blocks and a load into three others, with what lies between blocks."""
    rng = random.Random(seed)
    groups, memories = make_groups(rng, device, random_shapes(rng, device, 1), [9])
    (pool,), of_pool = make_pools(rng, device, groups, 5)
    first = rng.randrange(pool.blocks_per_page)
    pages = [4, 1, 2][: -(-(first + 3) // pool.blocks_per_page)]
    with kind(groups[0].layout, pool) as handler:
        handler.store(gpu_block_ids=[7, 0, 3], page_ids=pages, first_slot=first)
        handler.load(page_ids=pages, gpu_block_ids=[1, 8, 2], first_slot=first).synchronize()
    return [memory.raw.cpu() for memory in (*memories, *of_pool)]


@pytest.mark.parametrize("device", [Device, pytest.param(Gpu, marks=pytest.mark.gpu)])
def test_its_bytes_equal_an_offload_handlers(device: Any) -> None:
    for seed in range(30):
        kinds = OffloadHandler, ReferenceHandler
        left = [bytes_left_by(kind, device(), seed) for kind in kinds]
        assert all(map(torch.equal, *left)), seed


WRONG = {
    "a block that is none": {"gpu_block_ids": [BLOCKS], "page_ids": [0]},
    "a negative block": {"gpu_block_ids": [0, -1], "page_ids": [0]},
    "a page that is none": {"gpu_block_ids": [0], "page_ids": [PAGES]},
    "too few pages": {"gpu_block_ids": [0, 1], "page_ids": [0], "first_slot": 1},
    "too many pages": {"gpu_block_ids": [0, 1], "page_ids": [0, 1]},
    "a page without blocks": {"gpu_block_ids": [], "page_ids": [0]},
    "no slot of a page": {"gpu_block_ids": [0], "page_ids": [0], "first_slot": PER_PAGE},
    "ids that are no integers": {"gpu_block_ids": [0.5], "page_ids": [0]},
    "no list": {"gpu_block_ids": 1, "page_ids": [0]},
    "a page twice": {"gpu_block_ids": [0, 1, 2], "page_ids": [0, 0]},
    "a block twice": {"gpu_block_ids": [1, 1], "page_ids": [0]},
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("direction", ["store", "load"])
def test_it_refuses_what_an_offload_handler_refuses(direction: str, wrong: str) -> None:
    raised = []
    for kind in (OffloadHandler, ReferenceHandler):
        with make(kind) as handler:
            before = handler.pools[0].pages.clone() if kind is OffloadHandler else None
            try:
                getattr(handler, direction)(**WRONG[wrong])
                raised.append(None)
            except (IndexError, TypeError, ValueError) as error:
                raised.append(type(error))
                assert handler.poll() == []
            if before is not None and raised[0]:
                assert torch.equal(before, handler.pools[0].pages)
    assert raised[0] == raised[1]
    twice = {"a page twice": "store", "a block twice": "load"}
    assert (raised[0] is None) == (twice.get(wrong, direction) != direction)


def test_an_id_out_of_range_is_named() -> None:
    with make() as handler, pytest.raises(IndexError, match=r"gpu_block_ids\[1\] is 8; .* 0 to 7"):
        handler.store(gpu_block_ids=[0, 8], page_ids=[0])


def test_a_cache_that_moved_is_refused() -> None:
    handler = make()
    handler.gpu.tensors[0].data = torch.zeros(BLOCKS, 6, dtype=torch.int16)
    with pytest.raises(RuntimeError, match="has moved"):
        job_of(handler)
    assert handler.poll() == []


def test_what_it_cannot_copy_is_refused() -> None:
    layout = PagedLayout([torch.zeros(4, 4096, dtype=torch.bfloat16)])
    with pytest.raises(ValueError, match="encoding='raw'"):
        ReferenceHandler(layout, HostPool(layout, 2, encoding="lossless"))
    other, pool = PagedLayout([torch.zeros(4, 7)]), HostPool(layout, 2)
    with pytest.raises(ValueError, match="make the pool from this layout"):
        ReferenceHandler(other, pool)
    layout.device = torch.device("meta")
    with pytest.raises(
        ValueError, match="on meta is not supported: torch has no streams or events"
    ):
        ReferenceHandler(layout, pool)


def failing(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """The next copy fails."""

    def fail(*_: object) -> None:
        monkeypatch.undo()
        raise error

    monkeypatch.setattr(torch_kvswap.reference, "swap_blocks_batch", fail)


def test_a_failed_copy_is_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    handler = make()
    failing(monkeypatch, RuntimeError("the driver refuses"))
    bad, good = job_of(handler), job_of(handler)
    bad.wait()  # poll() reports it
    for call in (bad.synchronize, handler.synchronize):
        with pytest.raises(TransferError, match="store 0 failed: the driver refuses"):
            call()
    good.synchronize()
    results = handler.poll()
    assert [(one.job_id, one.state) for one in results] == [(0, "failed"), (1, "done")]
    assert isinstance(results[0].error, TransferError)
    handler.synchronize()


@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError()])
def test_a_raising_call_leaves_no_job(
    error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    handler = make()
    failing(monkeypatch, error)
    with pytest.raises(type(error)):
        job_of(handler)
    assert not handler._flights.running
    assert handler.poll() == []
    job_of(handler).synchronize()


def test_a_lost_device_fails_jobs_and_close_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*_: object) -> None:
        raise RuntimeError("illegal memory access")

    for call in ("query", "synchronize"):
        monkeypatch.setattr(torch_kvswap.reference._CpuEvent, call, lost)
    handler = make()
    job = job_of(handler)
    with pytest.raises(DeviceLostError, match="the device is lost: illegal memory access"):
        job.synchronize()
    job_of(handler)
    handler.close()
    assert [type(result.error) for result in handler.poll()] == [DeviceLostError] * 2


def test_a_closed_handler_reports_its_jobs() -> None:
    handler = make()
    job = job_of(handler)
    handler.close()
    handler.close()
    with pytest.raises(RuntimeError, match="the handler is closed"):
        job_of(handler)
    assert [result.job_id for result in handler.poll()] == [job.id]


def test_closing_the_pool_closes_the_handler() -> None:
    handler = make()
    handler.host.close()
    with pytest.raises(RuntimeError, match="the handler is closed"):
        handler.__enter__()


def test_a_dropped_handler_lets_its_memory_go() -> None:
    handler = make()
    job_of(handler)
    alive = [weakref.ref(handler.gpu), weakref.ref(handler.host)]
    del handler
    gc.collect()
    assert [reference() for reference in alive] == [None, None]


def test_swapped_arguments_are_refused_by_name() -> None:
    layout = PagedLayout([torch.zeros(8, 16)])
    pool: Any = HostPool(layout, 4)
    with pytest.raises(TypeError, match="gpu is a HostPool; pass one PagedLayout"):
        ReferenceHandler(pool, layout)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="host is a list; pass one HostPool"):
        ReferenceHandler(layout, [pool])  # type: ignore[arg-type]


def test_only_own_jobs_are_waited_for() -> None:
    handler = make()
    with pytest.raises(ValueError, match=r"jobs\[0\] is store 0 of another handler"):
        handler.synchronize(job_of(make()))
    with pytest.raises(TypeError, match=r"jobs\[0\] is an int; pass the Job"):
        handler.synchronize(5)
