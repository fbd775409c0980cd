"""On a GPU: jobs behind a held transfer wait in the handler's queue, and their callers go on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from caller_submits import CallerSubmits
from gpu_cache import NEW, OLD, GpuCache, Hold, ended, only
from patience import PATIENCE

from torch_kvswap.offload.handler import Job, OffloadHandler
from torch_kvswap.results import TransferError

pytestmark = pytest.mark.gpu

BLOCKS = 2048
JOBS = range(1, 2001)  # each its own block; block 0 is that of the transfer that holds up the rest
IN_FLIGHT = 64  # transfers that a channel gives to the device ahead of time
STAGING_EVENTS = 64  # two for each piece of its buffer


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
def test_thousands_of_small_jobs_are_submitted_at_once_and_every_byte_is_right(
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


def test_as_a_control_a_stream_blocks_who_gives_it_thousands_of_copies(gpu: GpuCache) -> None:
    busy = gpu.slow_on(gpu.side)
    with torch.cuda.stream(gpu.side):
        for j in range(3000):
            gpu.host.pages[j % BLOCKS, 0].copy_(gpu.cache[j % BLOCKS], non_blocking=True)
    assert busy.query()


@pytest.mark.parametrize("method", ["batch", "strided", "staged"])
def test_loads_in_many_layer_groups_do_not_fill_the_queue_of_the_driver(method: str) -> None:
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


@pytest.mark.parametrize("direction", ["store", "load"])
def test_one_job_of_thousands_of_fragments_is_submitted_at_once(
    gpu: GpuCache, direction: str
) -> None:
    noise = fill_with_noise(gpu, direction)
    order = torch.randperm(BLOCKS)
    busy = gpu.hold_on(gpu.side)
    submit(gpu.handler, direction, list(range(BLOCKS)), order.tolist(), after=busy)
    assert not busy.query()
    gpu.release()
    gpu.handler.synchronize(timeout=PATIENCE)
    torch.cuda.synchronize()
    assert torch.equal(gpu.host.pages[order, 0], gpu.cache.cpu())
    assert torch.equal(gpu.cache.cpu(), noise if direction == "store" else noise[order])


@pytest.mark.parametrize("direction", ["store", "load"])
def test_queued_jobs_of_one_destination_leave_the_bytes_of_the_last(
    gpu: GpuCache, direction: str
) -> None:
    noise = fill_with_noise(gpu, direction)
    busy, _ = hold(gpu, direction)
    for j in range(1, 400):
        block, page = (j, 5) if direction == "store" else (5, j)
        submit(gpu.handler, direction, [block], [page], after=())
    assert not busy.query()
    gpu.release()
    gpu.handler.synchronize(timeout=PATIENCE)
    written = gpu.host.pages[5, 0] if direction == "store" else gpu.cache[5].cpu()
    assert torch.equal(written, noise[399])


def test_queued_stores_and_loads_of_one_page_take_turns(gpu: GpuCache) -> None:
    noise = fill_with_noise(gpu, "store")
    busy, _ = hold(gpu, "store")
    # Block j goes through page 5 into block 1000 + j, for every j before the next one.
    for j in range(1, 300):
        gpu.handler.store(gpu_block_ids=[j], page_ids=[5], after=())
        gpu.handler.load(page_ids=[5], gpu_block_ids=[1000 + j], after=())
    assert not busy.query()
    gpu.release()
    gpu.handler.synchronize(timeout=PATIENCE)
    torch.cuda.synchronize()
    assert torch.equal(gpu.cache[1001:1300].cpu(), noise[1:300])


def test_ids_of_queued_jobs_may_change_after_the_call(gpu: GpuCache) -> None:
    noise = fill_with_noise(gpu, "store")
    blocks, page_ids = torch.tensor([0]), [0]
    busy, _ = hold(gpu, "store")
    for j in range(1, 301):
        blocks[0] = page_ids[0] = j
        gpu.handler.store(gpu_block_ids=blocks, page_ids=page_ids, after=())
    blocks[0] = page_ids[0] = BLOCKS - 1
    assert not busy.query()
    gpu.release()
    gpu.handler.synchronize(timeout=PATIENCE)
    assert torch.equal(gpu.host.pages[1:301, 0], noise[1:301])
    assert only(gpu.host.pages[301:]) == NEW


# Waiting for a queued job on a stream


@pytest.mark.parametrize("waits", [True, False], ids=["waits", "control"])
@pytest.mark.parametrize("after", ["nothing", "what holds them up"])
def test_a_stream_waits_for_the_last_queued_job_and_the_host_does_not(
    gpu: GpuCache, after: str, waits: bool
) -> None:
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


def test_the_host_waits_for_a_queued_job_no_longer_than_it_is_told_to(gpu: GpuCache) -> None:
    busy, _ = hold(gpu, "load")
    jobs = [gpu.handler.load(page_ids=[j], gpu_block_ids=[j], after=()) for j in range(1, 301)]
    with pytest.raises(TimeoutError, match=f"load {jobs[-1].id}"):
        gpu.handler.synchronize(jobs[-1], timeout=0.01)
    assert not busy.query()
    gpu.release()
    gpu.handler.synchronize(jobs[-1], timeout=PATIENCE)
    assert only(gpu.cache[:301]) == NEW


# Cancelling


@pytest.mark.parametrize("direction", ["store", "load"])
def test_a_cancelled_queued_job_ends_at_once_and_touches_nothing(
    gpu: GpuCache, direction: str
) -> None:
    busy, first = hold(gpu, direction)
    jobs = [submit(gpu.handler, direction, [j], [j], after=()) for j in range(1, 301)]
    kept, cancelled = jobs[:100] + jobs[200:], jobs[100:200]  # those behind go on as well
    for job in cancelled:
        assert gpu.handler.cancel(job)
        assert job.query()
        assert job.result is not None
        assert job.result.state == "cancelled"
        assert not job.result.ok
    assert sorted(result.job_id for result in gpu.handler.poll()) == [j.id for j in cancelled]
    assert not busy.query()
    assert not gpu.handler.cancel(cancelled[0])  # it has ended
    with pytest.raises(TransferError, match=f"{direction} {cancelled[0].id} .*cancelled"):
        gpu.handler.synchronize(cancelled[0])
    gpu.release()
    gpu.handler.synchronize([first, *kept], timeout=PATIENCE)
    assert [result.job_id for result in gpu.handler.poll()] == [first.id, *(j.id for j in kept)]
    torch.cuda.synchronize()
    written, right, left = {
        "store": (gpu.host.pages[:, 0], OLD, NEW),
        "load": (gpu.cache, NEW, OLD),
    }[direction]
    assert only(written[:101]) == right
    assert only(written[101:201]) == left
    assert only(written[201:301]) == right
    assert only(written[301:]) == left


def test_a_cancelled_running_job_ends_with_its_copy_and_is_reported_as_cancelled(
    gpu: GpuCache,
) -> None:
    busy, job = hold(gpu, "load")
    behind = gpu.handler.load(page_ids=[1], gpu_block_ids=[1], after=())
    assert gpu.handler.cancel(job)
    assert not job.query()
    assert gpu.handler.poll() == []
    assert not busy.query()
    gpu.release()
    assert ended(gpu.handler, job) == "cancelled"
    assert not gpu.handler.cancel(job)
    gpu.handler.synchronize(behind)
    assert [r.state for r in gpu.handler.poll()] == ["cancelled", "done"]
    assert only(gpu.cache[1]) == NEW


def test_a_job_that_is_done_cannot_be_cancelled(gpu: GpuCache) -> None:
    job = gpu.handler.load(page_ids=[1], gpu_block_ids=[1])
    gpu.handler.synchronize(job)
    assert not gpu.handler.cancel(job)
    assert [result.state for result in gpu.handler.poll()] == ["done"]


def test_a_load_of_a_page_whose_queued_store_was_cancelled_fails(gpu: GpuCache) -> None:
    busy, _ = hold(gpu, "store")
    stores = [gpu.handler.store(gpu_block_ids=[j], page_ids=[j], after=()) for j in range(1, 201)]
    early = gpu.handler.load(page_ids=[200], gpu_block_ids=[300], after=())
    assert gpu.handler.cancel(stores[-1])
    late = gpu.handler.load(page_ids=[200], gpu_block_ids=[301], after=())
    other = gpu.handler.load(page_ids=[199], gpu_block_ids=[302], after=())
    assert not busy.query()
    gpu.release()
    assert [ended(gpu.handler, job) for job in (early, late, other)] == ["failed", "failed", "done"]
    for job in (early, late):
        assert job.result is not None
        assert f"store {stores[-1].id}" in str(job.result.error)
    gpu.handler.poll()
    gpu.handler.synchronize(
        [
            gpu.handler.store(gpu_block_ids=[5], page_ids=[200]),
            gpu.handler.load(page_ids=[200], gpu_block_ids=[303]),
        ]
    )  # valid again
    torch.cuda.synchronize()
    assert only(gpu.cache[303]) == OLD


# Expedited loads


@pytest.mark.parametrize("expedited", [True, False], ids=["expedited", "control"])
def test_an_expedited_load_passes_thousands_of_queued_loads(gpu: GpuCache, expedited: bool) -> None:
    hold(gpu, "load")
    for j in JOBS:
        gpu.handler.load(page_ids=[j], gpu_block_ids=[j], after=())
    job = gpu.handler.load(page_ids=[2047], gpu_block_ids=[2047], after=(), expedited=expedited)
    if expedited:
        gpu.handler.synchronize(job, timeout=PATIENCE)
    else:
        with pytest.raises(TimeoutError):
            gpu.handler.synchronize(job, timeout=0.1)
    gpu.release()
    gpu.handler.synchronize(job, timeout=PATIENCE)
    assert only(gpu.cache[2047]) == NEW
    assert only(gpu.cache[2001:2047]) == OLD
    gpu.handler.synchronize(timeout=PATIENCE)
    assert only(gpu.cache[:2001]) == NEW


# What it costs


@pytest.mark.parametrize("direction", ["store", "load"])
def test_queued_jobs_are_merged_and_streams_and_events_stay_few(
    gpu: GpuCache, direction: str
) -> None:
    def channel() -> Any:
        metrics = gpu.handler.metrics()
        return metrics.stores if direction == "store" else metrics.loads

    def one_round() -> None:
        busy, _ = hold(gpu, direction)
        for j in JOBS:
            submit(gpu.handler, direction, [j], [j], after=())
        now = channel()
        assert not busy.query()
        assert now.running <= IN_FLIGHT
        assert now.queued + now.running == 1 + len(JOBS)
        gpu.release()
        gpu.handler.synchronize(timeout=PATIENCE)
        assert len(gpu.handler.poll()) == 1 + len(JOBS)

    before = channel()
    one_round()
    first = channel()
    assert first.done - before.done == 1 + len(JOBS)
    assert (first.queued, first.running) == (0, 0)
    assert IN_FLIGHT <= first.transfers - before.transfers < len(JOBS) / 4
    assert first.streams <= 3  # its own, one that waits for events, and one for kernels
    assert first.events <= 4 * (IN_FLIGHT + 1) + STAGING_EVENTS
    one_round()
    assert channel().streams == first.streams
    assert channel().events <= first.events + STAGING_EVENTS


@pytest.mark.parametrize("end", ["close", "pool"])
def test_closing_with_a_full_queue_waits_for_every_job(gpu: GpuCache, end: str) -> None:
    busy = gpu.slow_on(gpu.side)
    first = gpu.handler.store(gpu_block_ids=[0], page_ids=[0], after=busy)
    jobs = [first, *(gpu.handler.store(gpu_block_ids=[j], page_ids=[j], after=()) for j in JOBS)]
    view = gpu.host.pages
    close: Callable[[], None] = gpu.handler.close if end == "close" else gpu.host.close
    close()
    assert busy.query()
    assert [result.job_id for result in gpu.handler.poll()] == [job.id for job in jobs]
    assert only(view[:2001]) == OLD
    assert only(view[2001:]) == NEW
