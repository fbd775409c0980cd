"""On a GPU: jobs behind a transfer that is held up wait in the handler's queue, not in their caller."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from patience import PATIENCE
from rigs import NEW, OLD, Hold, Rig, ended, only

from torch_kvswap.handler import Job, OffloadHandler, TransferError

pytestmark = pytest.mark.gpu

BLOCKS = 2048
JOBS = range(1, 2001)  # each its own block; block 0 is that of the transfer that holds up the rest
IN_FLIGHT = 64  # transfers that a channel gives to the device ahead of time
STAGING_EVENTS = 64  # two for each piece of its buffer


@pytest.fixture
def rig() -> Iterator[Rig]:
    with Rig(blocks=BLOCKS, row=512) as rig:
        yield rig


def hold(rig: Rig, direction: str) -> tuple[Hold, Job]:
    """Submits a transfer of block 0 that is held up, and all others of its direction behind it; the
    event happens when they go on."""
    busy = rig.hold_on(rig.side)
    return busy, submit(rig.handler, direction, [0], [0], after=busy)


def submit(
    handler: OffloadHandler, direction: str, blocks: list[int], pages: list[int], **options: object
) -> Job:
    if direction == "store":
        return handler.store(blocks, pages, **options)
    return handler.load(pages, blocks, **options)


def fill_with_noise(rig: Rig, direction: str) -> torch.Tensor:
    """Random bytes in what the direction reads; returns them."""
    noise = torch.randint(256, (BLOCKS, 512), dtype=torch.uint8)
    if direction == "store":
        rig.cache.copy_(noise)
    else:
        rig.host.pages.copy_(noise.view(BLOCKS, 1, 512))
    torch.cuda.synchronize()
    return noise


# Submitting


@pytest.mark.parametrize("after", ["nothing", "what holds them up"])
@pytest.mark.parametrize("direction", ["store", "load"])
def test_thousands_of_small_jobs_are_submitted_at_once_and_every_byte_is_right(
    rig: Rig, direction: str, after: str
) -> None:
    noise = fill_with_noise(rig, direction)
    order = torch.randperm(BLOCKS)[: len(JOBS)].tolist()
    busy, _ = hold(rig, direction)
    jobs = [
        submit(rig.handler, direction, [j], [k], after=() if after == "nothing" else busy)
        for j, k in zip(JOBS, order, strict=True)
    ]
    assert not busy.query()
    assert not jobs[0].done()
    rig.release()
    rig.handler.wait(timeout=PATIENCE)
    results = rig.handler.finished()
    assert [result.job_id for result in results[1:]] == [job.id for job in jobs]
    assert {result.state for result in results} == {"done"}
    torch.cuda.synchronize()
    if direction == "store":
        assert torch.equal(rig.host.pages[order, 0], noise[list(JOBS)])
        untouched = [p for p in range(1, BLOCKS) if p not in set(order)]
        assert only(rig.host.pages[untouched]) == NEW
    else:
        assert torch.equal(rig.cache[list(JOBS)].cpu(), noise[order])
        assert only(rig.cache[len(JOBS) + 1 :]) == OLD


def test_as_a_control_a_stream_blocks_who_gives_it_thousands_of_copies(rig: Rig) -> None:
    busy = rig.slow_on(rig.side)
    with torch.cuda.stream(rig.side):
        for j in range(3000):
            rig.host.pages[j % BLOCKS, 0].copy_(rig.cache[j % BLOCKS], non_blocking=True)
    assert busy.query()


@pytest.mark.parametrize("direction", ["store", "load"])
def test_one_job_of_thousands_of_fragments_is_submitted_at_once(rig: Rig, direction: str) -> None:
    noise = fill_with_noise(rig, direction)
    order = torch.randperm(BLOCKS)
    busy = rig.hold_on(rig.side)
    submit(rig.handler, direction, list(range(BLOCKS)), order.tolist(), after=busy)
    assert not busy.query()
    rig.release()
    rig.handler.wait(timeout=PATIENCE)
    torch.cuda.synchronize()
    assert torch.equal(rig.host.pages[order, 0], rig.cache.cpu())
    assert torch.equal(rig.cache.cpu(), noise if direction == "store" else noise[order])


@pytest.mark.parametrize("direction", ["store", "load"])
def test_queued_jobs_of_one_destination_leave_the_bytes_of_the_last(
    rig: Rig, direction: str
) -> None:
    noise = fill_with_noise(rig, direction)
    busy, _ = hold(rig, direction)
    for j in range(1, 400):
        block, page = (j, 5) if direction == "store" else (5, j)
        submit(rig.handler, direction, [block], [page], after=())
    assert not busy.query()
    rig.release()
    rig.handler.wait(timeout=PATIENCE)
    written = rig.host.pages[5, 0] if direction == "store" else rig.cache[5].cpu()
    assert torch.equal(written, noise[399])


def test_queued_stores_and_loads_of_one_page_take_turns(rig: Rig) -> None:
    noise = fill_with_noise(rig, "store")
    busy, _ = hold(rig, "store")
    # Block j goes through page 5 into block 1000 + j, for every j before the next one.
    for j in range(1, 300):
        rig.handler.store([j], [5], after=())
        rig.handler.load([5], [1000 + j], after=())
    assert not busy.query()
    rig.release()
    rig.handler.wait(timeout=PATIENCE)
    torch.cuda.synchronize()
    assert torch.equal(rig.cache[1001:1300].cpu(), noise[1:300])


def test_ids_of_queued_jobs_may_change_after_the_call(rig: Rig) -> None:
    noise = fill_with_noise(rig, "store")
    blocks, page_ids = torch.tensor([0]), [0]
    busy, _ = hold(rig, "store")
    for j in range(1, 301):
        blocks[0] = page_ids[0] = j
        rig.handler.store(blocks, page_ids, after=())
    blocks[0] = page_ids[0] = BLOCKS - 1
    assert not busy.query()
    rig.release()
    rig.handler.wait(timeout=PATIENCE)
    assert torch.equal(rig.host.pages[1:301, 0], noise[1:301])
    assert only(rig.host.pages[301:]) == NEW


# Waiting for a queued job on a stream


@pytest.mark.parametrize("waits", [True, False], ids=["waits", "control"])
@pytest.mark.parametrize("after", ["nothing", "what holds them up"])
def test_a_stream_waits_for_the_last_queued_job_and_the_host_does_not(
    rig: Rig, after: str, waits: bool
) -> None:
    # Jobs with an event that has not happened cannot be merged, and a stream holds about 1,000.
    count = 2000 if after == "nothing" else 200
    busy, _ = hold(rig, "load")
    for j in range(1, count + 1):
        last = rig.handler.load([j], [j], after=() if after == "nothing" else busy)
    with torch.cuda.stream(rig.consumer):
        if waits:
            last.wait_on(rig.consumer)
        rig.look()
    assert not busy.query()
    if waits:
        rig.release()
    rig.consumer.synchronize()
    rig.release()
    assert only(rig.seen[: count + 1]) == (NEW if waits else OLD)
    assert only(rig.seen[count + 1 :]) == OLD
    rig.handler.wait(timeout=PATIENCE)


def test_the_host_waits_for_a_queued_job_no_longer_than_it_is_told_to(rig: Rig) -> None:
    busy, _ = hold(rig, "load")
    jobs = [rig.handler.load([j], [j], after=()) for j in range(1, 301)]
    with pytest.raises(TimeoutError, match=f"load {jobs[-1].id}"):
        rig.handler.wait(jobs[-1], timeout=0.01)
    assert not busy.query()
    rig.release()
    rig.handler.wait(jobs[-1], timeout=PATIENCE)
    assert only(rig.cache[:301]) == NEW


# Cancelling


@pytest.mark.parametrize("direction", ["store", "load"])
def test_a_cancelled_queued_job_ends_at_once_and_touches_nothing(rig: Rig, direction: str) -> None:
    busy, first = hold(rig, direction)
    jobs = [submit(rig.handler, direction, [j], [j], after=()) for j in range(1, 301)]
    kept, cancelled = jobs[:100] + jobs[200:], jobs[100:200]  # those behind go on as well
    for job in cancelled:
        assert rig.handler.cancel(job)
        assert job.done()
        assert job.result is not None
        assert job.result.state == "cancelled"
        assert not job.result.ok
    assert sorted(result.job_id for result in rig.handler.finished()) == [j.id for j in cancelled]
    assert not busy.query()
    assert not rig.handler.cancel(cancelled[0])  # it has ended
    with pytest.raises(TransferError, match=f"{direction} {cancelled[0].id} .*cancelled"):
        rig.handler.wait(cancelled[0])
    rig.release()
    rig.handler.wait([first, *kept], timeout=PATIENCE)
    assert [result.job_id for result in rig.handler.finished()] == [first.id, *(j.id for j in kept)]
    torch.cuda.synchronize()
    written, right, left = {
        "store": (rig.host.pages[:, 0], OLD, NEW),
        "load": (rig.cache, NEW, OLD),
    }[direction]
    assert only(written[:101]) == right
    assert only(written[101:201]) == left
    assert only(written[201:301]) == right
    assert only(written[301:]) == left


def test_a_cancelled_running_job_ends_with_its_copy_and_is_reported_as_cancelled(rig: Rig) -> None:
    busy, job = hold(rig, "load")
    behind = rig.handler.load([1], [1], after=())
    assert rig.handler.cancel(job)
    assert not job.done()
    assert rig.handler.finished() == []
    assert not busy.query()
    rig.release()
    assert ended(rig.handler, job) == "cancelled"
    assert not rig.handler.cancel(job)
    rig.handler.wait(behind)
    assert [r.state for r in rig.handler.finished()] == ["cancelled", "done"]
    assert only(rig.cache[1]) == NEW


def test_a_job_that_is_done_cannot_be_cancelled(rig: Rig) -> None:
    job = rig.handler.load([1], [1])
    rig.handler.wait(job)
    assert not rig.handler.cancel(job)
    assert [result.state for result in rig.handler.finished()] == ["done"]


def test_a_load_of_a_page_whose_queued_store_was_cancelled_fails(rig: Rig) -> None:
    busy, _ = hold(rig, "store")
    stores = [rig.handler.store([j], [j], after=()) for j in range(1, 201)]
    early = rig.handler.load([200], [300], after=())
    assert rig.handler.cancel(stores[-1])
    late = rig.handler.load([200], [301], after=())
    other = rig.handler.load([199], [302], after=())
    assert not busy.query()
    rig.release()
    assert [ended(rig.handler, job) for job in (early, late, other)] == ["failed", "failed", "done"]
    for job in (early, late):
        assert job.result is not None
        assert f"store {stores[-1].id}" in str(job.result.error)
    rig.handler.finished()
    rig.handler.wait([rig.handler.store([5], [200]), rig.handler.load([200], [303])])  # valid again
    torch.cuda.synchronize()
    assert only(rig.cache[303]) == OLD


# Expedited loads


@pytest.mark.parametrize("expedited", [True, False], ids=["expedited", "control"])
def test_an_expedited_load_passes_thousands_of_queued_loads(rig: Rig, expedited: bool) -> None:
    hold(rig, "load")
    for j in JOBS:
        rig.handler.load([j], [j], after=())
    job = rig.handler.load([2047], [2047], after=(), expedited=expedited)
    if expedited:
        rig.handler.wait(job, timeout=PATIENCE)
    else:
        with pytest.raises(TimeoutError):
            rig.handler.wait(job, timeout=0.1)
    rig.release()
    rig.handler.wait(job, timeout=PATIENCE)
    assert only(rig.cache[2047]) == NEW
    assert only(rig.cache[2001:2047]) == OLD
    rig.handler.wait(timeout=PATIENCE)
    assert only(rig.cache[:2001]) == NEW


# What it costs


@pytest.mark.parametrize("direction", ["store", "load"])
def test_queued_jobs_are_merged_and_streams_and_events_stay_few(rig: Rig, direction: str) -> None:
    def channel() -> Any:
        metrics = rig.handler.metrics()
        return metrics.stores if direction == "store" else metrics.loads

    def one_round() -> None:
        busy, _ = hold(rig, direction)
        for j in JOBS:
            submit(rig.handler, direction, [j], [j], after=())
        now = channel()
        assert not busy.query()
        assert now.running <= IN_FLIGHT
        assert now.queued + now.running == 1 + len(JOBS)
        rig.release()
        rig.handler.wait(timeout=PATIENCE)
        assert len(rig.handler.finished()) == 1 + len(JOBS)

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
def test_closing_with_a_full_queue_waits_for_every_job(rig: Rig, end: str) -> None:
    busy = rig.slow_on(rig.side)
    first = rig.handler.store([0], [0], after=busy)
    jobs = [first, *(rig.handler.store([j], [j], after=()) for j in JOBS)]
    view = rig.host.pages
    close: Callable[[], None] = rig.handler.close if end == "close" else rig.host.close
    close()
    assert busy.query()
    assert [result.job_id for result in rig.handler.finished()] == [job.id for job in jobs]
    assert only(view[:2001]) == OLD
    assert only(view[2001:]) == NEW
