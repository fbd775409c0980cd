"""On a GPU: what the reference handler's copies wait for. Each test of an order has a control that
gives wrong bytes. tests/unit/test_handler.py compares its bytes in every layout.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from gpu_cache import NEW, OLD, GpuCache, only

from torch_kvswap.reference import ReferenceHandler

pytestmark = pytest.mark.gpu

ORDER = pytest.mark.parametrize("order", ["kept", "lost as a control"])


@pytest.fixture
def handler(gpu: GpuCache) -> Iterator[ReferenceHandler]:
    """Has copied once: the first copy may wait for the device, which tests keep busy."""
    handler = ReferenceHandler(gpu.layout, gpu.host)
    handler.store(gpu_block_ids=[3], page_ids=[3]).synchronize()
    handler.poll()
    gpu.host.pages.fill_(NEW)
    yield handler
    gpu.release()  # a handler that is dropped waits for its copies


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
    gpu.release()
    assert only(gpu.seen[1]) == (NEW if order == "kept" else OLD)
