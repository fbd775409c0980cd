"""On a GPU: what the reference handler's copies wait for. Each test of an order has a control that
gives wrong bytes. tests/unit/test_handler.py compares its bytes in every layout.
"""

from __future__ import annotations

import gc

import pytest
import torch
from gpu_cache import NEW, OLD, GpuCache, only

from torch_kvswap.reference import ReferenceHandler

pytestmark = pytest.mark.gpu

ORDER = pytest.mark.parametrize("order", ["kept", "lost as a control"])


@pytest.fixture
def handler(gpu: GpuCache) -> ReferenceHandler:
    """Has copied once: the first copy may wait for the device, which tests keep busy."""
    handler = ReferenceHandler(gpu.layout, gpu.host)
    handler.store(gpu_block_ids=[3], page_ids=[3]).synchronize()
    handler.poll()
    gpu.host.pages.fill_(NEW)
    return handler


def compute_stream(gpu: GpuCache, order: str) -> torch.cuda.Stream:
    """The current stream, or as a control another one."""
    return torch.cuda.current_stream() if order == "kept" else gpu.side


@ORDER
def test_a_store_waits_for_the_kernel_that_writes_its_block(
    gpu: GpuCache, handler: ReferenceHandler, order: str
) -> None:
    gpu.hold()
    gpu.cache.fill_(NEW + 1)
    with torch.cuda.stream(compute_stream(gpu, order)):
        job = handler.store(gpu_block_ids=[1], page_ids=[0])
    if order == "kept":
        assert not job.query()
        gpu.release()
    job.synchronize()
    assert gpu.page() == (NEW + 1 if order == "kept" else OLD)


@ORDER
def test_a_load_waits_for_the_kernel_that_reads_its_block(
    gpu: GpuCache, handler: ReferenceHandler, order: str
) -> None:
    gpu.hold()
    gpu.look()
    with torch.cuda.stream(compute_stream(gpu, order)):
        job = handler.load(page_ids=[0], gpu_block_ids=[1])
    if order == "kept":
        assert not job.query()
        gpu.release()
    job.synchronize()
    gpu.release()
    torch.cuda.synchronize()
    assert only(gpu.seen[1]) == (OLD if order == "kept" else NEW)
    assert only(gpu.cache[1]) == NEW
    assert only(gpu.cache[[0, 2, 3]]) == OLD


@ORDER
def test_a_load_waits_for_the_store_of_its_page(
    gpu: GpuCache, handler: ReferenceHandler, order: str
) -> None:
    second = handler if order == "kept" else ReferenceHandler(gpu.layout, gpu.host)
    gpu.hold_on(gpu.side)
    with torch.cuda.stream(gpu.side):
        handler.store(gpu_block_ids=[1], page_ids=[0])
    load = second.load(page_ids=[0], gpu_block_ids=[2])
    if order == "kept":
        assert not load.query()
        gpu.release()
    load.synchronize()
    assert only(gpu.cache[2]) == (OLD if order == "kept" else NEW)


@ORDER
def test_a_stream_waits_for_a_load_and_the_host_does_not(
    gpu: GpuCache, handler: ReferenceHandler, order: str
) -> None:
    busy = gpu.hold()
    job = handler.load(page_ids=[0], gpu_block_ids=[1])
    with torch.cuda.stream(gpu.consumer):
        if order == "kept":
            job.wait()
        gpu.look()
    assert not busy.query()
    if order == "kept":
        gpu.release()
    gpu.consumer.synchronize()
    assert only(gpu.seen[1]) == (NEW if order == "kept" else OLD)


def test_a_dropped_handler_waits_for_its_jobs(gpu: GpuCache) -> None:
    handler = ReferenceHandler(gpu.layout, gpu.host)
    busy = gpu.slow()
    gpu.cache.fill_(NEW + 1)
    handler.store(gpu_block_ids=[1], page_ids=[0])
    handler.poll()
    del handler
    gc.collect()  # its job and the handler hold each other until poll() has reported the job
    assert busy.query()
    assert gpu.page() == NEW + 1


def test_closing_the_pool_waits_for_the_jobs_in_flight(
    gpu: GpuCache, handler: ReferenceHandler
) -> None:
    pages, busy = gpu.host.pages, gpu.slow()
    gpu.cache.fill_(NEW + 1)
    job = handler.store(gpu_block_ids=[1], page_ids=[0])
    gpu.host.close()
    assert busy.query()
    assert only(pages[0]) == NEW + 1
    assert handler.poll() == [job.result]


def test_the_time_of_a_job_is_that_of_its_copy(gpu: GpuCache, handler: ReferenceHandler) -> None:
    gpu.slow(200)
    job = handler.store(gpu_block_ids=[0, 1, 2, 3], page_ids=[0, 1, 2, 3])
    job.synchronize()
    assert job.result is not None
    assert job.result.copy_method == "batch"
    assert 0 < job.result.copy_seconds < 0.1


def test_the_callers_stream_and_device_stay_current(
    gpu: GpuCache, handler: ReferenceHandler
) -> None:
    with torch.cuda.stream(gpu.side):
        handler.load(page_ids=[0], gpu_block_ids=[0]).wait(gpu.consumer)
        handler.synchronize()
        assert torch.cuda.current_stream() == gpu.side
        assert torch.cuda.current_device() == 0
