"""On a GPU: jobs behind a held transfer wait in the handler's queue, and their callers go on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from caller_submits import CallerSubmits
from gpu_cache import NEW, OLD, GpuCache, Hold, only
from patience import PATIENCE

from torch_kvswap.offload.handler import Job, OffloadHandler

pytestmark = pytest.mark.gpu

BLOCKS = 2048
JOBS = range(1, 2001)  # each its own block; block 0 is that of the transfer that holds up the rest


@pytest.fixture
def gpu() -> Iterator[GpuCache]:
    with GpuCache(blocks=BLOCKS, row=512) as gpu:
        yield gpu


def hold(gpu: GpuCache, direction: str) -> tuple[Hold, Job]:
    """Submits a transfer of block 0 that is held up, and all others of its direction behind it; the
    event happens when they go on."""
    busy = gpu.hold_on(gpu.side)
    return busy, submit(gpu.handler, direction, [0], [0], after=busy)


def submit(
    handler: OffloadHandler, direction: str, blocks: list[int], pages: list[int], **options: object
) -> Job:
    if direction == "store":
        return handler.store(gpu_block_ids=blocks, page_ids=pages, **options)
    return handler.load(page_ids=pages, gpu_block_ids=blocks, **options)


def fill_with_noise(gpu: GpuCache, direction: str) -> torch.Tensor:
    """Random bytes in what the direction reads; returns them."""
    noise = torch.randint(256, (BLOCKS, 512), dtype=torch.uint8)
    if direction == "store":
        gpu.cache.copy_(noise)
    else:
        gpu.host.pages.copy_(noise.view(BLOCKS, 1, 512))
    torch.cuda.synchronize()
    return noise


# Submitting


@pytest.mark.parametrize("after", ["nothing", "what holds them up"])
@pytest.mark.parametrize("direction", ["store", "load"])
def test_thousands_of_small_jobs_are_submitted_at_once(
    gpu: GpuCache, direction: str, after: str
) -> None:
    noise = fill_with_noise(gpu, direction)
    order = torch.randperm(BLOCKS)[: len(JOBS)].tolist()
    busy, _ = hold(gpu, direction)
    jobs = [
        submit(gpu.handler, direction, [j], [k], after=() if after == "nothing" else busy)
        for j, k in zip(JOBS, order, strict=True)
    ]
    assert not busy.query()
    assert not jobs[0].query()
    gpu.release()
    gpu.handler.synchronize(timeout=PATIENCE)
    results = gpu.handler.poll()
    assert [result.job_id for result in results[1:]] == [job.id for job in jobs]
    assert {result.state for result in results} == {"done"}
    torch.cuda.synchronize()
    if direction == "store":
        assert torch.equal(gpu.host.pages[order, 0], noise[list(JOBS)])
        untouched = [p for p in range(1, BLOCKS) if p not in set(order)]
        assert only(gpu.host.pages[untouched]) == NEW
    else:
        assert torch.equal(gpu.cache[list(JOBS)].cpu(), noise[order])
        assert only(gpu.cache[len(JOBS) + 1 :]) == OLD


def test_control_thousands_of_copies_block_the_caller(gpu: GpuCache) -> None:
    busy = gpu.slow_on(gpu.side)
    with torch.cuda.stream(gpu.side):
        for j in range(3000):
            gpu.host.pages[j % BLOCKS, 0].copy_(gpu.cache[j % BLOCKS], non_blocking=True)
    assert busy.query()


@pytest.mark.parametrize("method", ["batch", "strided", "staged"])
def test_many_layer_groups_do_not_fill_the_queue(method: str) -> None:
    layers = 32
    with (
        GpuCache(blocks=64, layers=layers) as gpu,
        CallerSubmits(gpu.layout, gpu.host, copy_method=method) as handler,
    ):
        ids = range(64)
        handler.synchronize(handler.load(page_ids=[0], gpu_block_ids=[0]))
        busy = gpu.slow_on(gpu.side)
        for j in ids:
            handler.load(page_ids=[j], gpu_block_ids=[j], after=gpu.side, layer_groups=layers)
        assert not busy.query()
        assert handler.metrics().loads.queued > 0
        handler.synchronize(timeout=PATIENCE)
        assert {only(layer) for layer in gpu.layers} == {NEW}


# Waiting for a queued job on a stream


@pytest.mark.parametrize("waits", [True, False], ids=["waits", "control"])
@pytest.mark.parametrize("after", ["nothing", "what holds them up"])
def test_a_stream_waits_for_the_last_queued_job(gpu: GpuCache, after: str, waits: bool) -> None:
    # Jobs with an event that has not happened cannot be merged, and a stream holds about 1,000.
    count = 2000 if after == "nothing" else 200
    busy, _ = hold(gpu, "load")
    for j in range(1, count + 1):
        last = gpu.handler.load(
            page_ids=[j], gpu_block_ids=[j], after=() if after == "nothing" else busy
        )
    with torch.cuda.stream(gpu.consumer):
        if waits:
            last.wait(gpu.consumer)
        gpu.look()
    assert not busy.query()
    if waits:
        gpu.release()
    gpu.consumer.synchronize()
    gpu.release()
    assert only(gpu.seen[: count + 1]) == (NEW if waits else OLD)
    assert only(gpu.seen[count + 1 :]) == OLD
    gpu.handler.synchronize(timeout=PATIENCE)
