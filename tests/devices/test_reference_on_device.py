"""The reference handler on an accelerator that only PyTorch drives."""

from __future__ import annotations

import gc

import pytest
import torch
from error_text import one_line
from fake_accelerator import DEVICE_TYPE, Accelerator, on_fake_accelerator
from logged import logged

import torch_kvswap as kvs
from torch_kvswap.devices import blocks
from torch_kvswap.reference import Job, ReferenceHandler

BLOCKS, PAGES, PER_PAGE, ROW = 8, 4, 2, 6


def current() -> torch.Stream:
    return torch.accelerator.current_stream()


class Rows:
    """A cache of blocks on the device, each filled with its number, and its handler."""

    def __init__(self) -> None:
        numbers = torch.arange(BLOCKS, dtype=torch.int16)[:, None].expand(BLOCKS, ROW)
        self.tensor = numbers.contiguous().to(DEVICE_TYPE)
        self.layout = kvs.PagedLayout([self.tensor])
        self.pool = kvs.HostPool(self.layout, PAGES)
        self.handler = ReferenceHandler(self.layout, self.pool)

    def page(self, page: int) -> set[int]:
        return set(self.pool.pages[page].view(torch.int16).flatten().tolist())

    def set_page(self, page: int, value: int) -> None:
        self.pool.pages[page].view(torch.int16).fill_(value)

    def block(self, block: int) -> set[int]:
        return set(self.tensor[block].cpu().tolist())

    def store(self, block: int, page: int) -> Job:
        return self.handler.store(gpu_block_ids=[block], page_ids=[page])

    def load(self, page: int, block: int) -> Job:
        return self.handler.load(page_ids=[page], gpu_block_ids=[block])


def strided(words: int, room: int) -> torch.Tensor:
    """Random bytes of keys and values, [2, BLOCKS, words], with room between the blocks."""
    values = torch.randint(256, (2, BLOCKS, words + room), dtype=torch.uint8)
    return values.to(DEVICE_TYPE)[..., :words]


@pytest.mark.parametrize("staging_bytes", [32 << 20, 1])
@pytest.mark.parametrize("pinned", [True, False])
@on_fake_accelerator
def test_blocks_come_back_from_scattered_pages(
    accelerator: Accelerator, pinned: bool, staging_bytes: int
) -> None:
    limit, blocks.STAGING_BYTES = blocks.STAGING_BYTES, staging_bytes
    try:
        tensors = [strided(12, 0), strided(12, 4), strided(3, 0)]
        layout = kvs.PagedLayout(tensors, block_dim=1)
        values = [tensor.cpu() for tensor in tensors]
        with (
            logged(),
            kvs.HostPool(layout, PAGES, PER_PAGE, shared=not pinned) as pool,
            ReferenceHandler(layout, pool) as handler,
        ):
            assert pool.is_pinned == pinned
            stored, pages = [6, 1, 7, 0, 3], [3, 0, 2]
            handler.store(gpu_block_ids=stored, page_ids=pages, first_slot=1)
            handler.synchronize()
            for place, block in enumerate(stored, 1):
                slot = pool.pages[pages[place // PER_PAGE], place % PER_PAGE]
                expected = b"".join(v[i, block].numpy().tobytes() for v in values for i in range(2))
                assert bytes(slot.tolist())[: len(expected)] == expected
            for tensor in tensors:
                tensor.zero_()
            handler.load(page_ids=pages, gpu_block_ids=stored[::-1], first_slot=1).wait()
            for tensor, before in zip(tensors, values, strict=True):
                expected_now = torch.zeros_like(before)
                expected_now[:, stored[::-1]] = before[:, stored]
                assert torch.equal(tensor.cpu(), expected_now)
            handler.synchronize()
            results = handler.poll()
            assert [(one.state, one.copy_method) for one in results] == [("done", "generic")] * 2
            assert all(one.copy_seconds > 0 for one in results)
    finally:
        blocks.STAGING_BYTES = limit


@on_fake_accelerator
def test_a_store_waits_for_the_current_stream(accelerator: Accelerator) -> None:
    rows = Rows()
    with accelerator.hold(current()):
        rows.tensor[1].fill_(50)  # behind the hold, as a kernel that writes the block
        job, other = rows.store(1, 0), torch.Stream(DEVICE_TYPE)
        with other:  # the control: nothing of this stream is held
            early = ReferenceHandler(rows.layout, rows.pool)
            early.store(gpu_block_ids=[1], page_ids=[1]).synchronize()
        assert not job.query()
    job.synchronize()
    assert (rows.page(0), rows.page(1)) == ({50}, {1})


@pytest.mark.parametrize("order", ["kept", "lost as a control"])
@pytest.mark.parametrize(
    ("first", "second", "right"),  # the block or the page that both write or read
    [("store", "load", 1), ("load", "store", 50), ("store", "store", 2), ("load", "load", 51)],
)
@on_fake_accelerator
def test_a_transfer_waits_for_the_one_before_it(
    accelerator: Accelerator, first: str, second: str, right: int, order: str
) -> None:
    rows, side = Rows(), torch.Stream(DEVICE_TYPE)
    rows.set_page(0, 50)
    rows.set_page(3, 51)
    handler = rows.handler if order == "kept" else ReferenceHandler(rows.layout, rows.pool)
    with accelerator.hold(side):
        with side:
            job = rows.store(1, 0) if first == "store" else rows.load(0, 1)
        block, page = (2, 0) if first == "store" else (1, 3)
        ids = {"gpu_block_ids": [block], "page_ids": [page]}
        later = handler.store(**ids) if second == "store" else handler.load(**ids)
        if order != "kept":
            later.synchronize()
        assert not job.query()
    for one in (job, later):
        one.synchronize()
    found = {"sl": rows.block(2), "ls": rows.page(3), "ss": rows.page(0), "ll": rows.block(1)}
    assert (found[first[0] + second[0]] == {right}) == (order == "kept")


@on_fake_accelerator
def test_a_waiting_stream_reads_what_a_load_wrote(accelerator: Accelerator) -> None:
    rows, side = Rows(), torch.Stream(DEVICE_TYPE)
    late, early = torch.zeros(2, ROW, dtype=torch.int16, device=DEVICE_TYPE)
    rows.set_page(0, 50)
    with accelerator.hold(current()):
        job = rows.load(0, 3)
        with torch.Stream(DEVICE_TYPE) as nobody:  # the control: it does not wait
            early.copy_(rows.tensor[3])
        job.wait(side)
        with side:
            late.copy_(rows.tensor[3])
        nobody.synchronize()
        assert not side.query()
    side.synchronize()
    assert (set(late.tolist()), set(early.tolist())) == ({50}, {3})


@on_fake_accelerator
def test_memory_that_is_freed_too_early_is_told(accelerator: Accelerator) -> None:
    """As a control for all tests on the accelerator."""
    cache, page = torch.ones(64, device=DEVICE_TYPE), torch.zeros(64).pin_memory()
    with torch.Stream(DEVICE_TYPE) as stream, accelerator.hold(stream):
        page.copy_(cache, non_blocking=True)
        del cache  # its own stream frees it before the copy runs
        torch.Stream(DEVICE_TYPE).synchronize()
    stream.synchronize()
    assert "that were freed" in accelerator.take_error()


@on_fake_accelerator
def test_a_dropped_handler_frees_nothing_too_early(accelerator: Accelerator) -> None:
    """The accelerator tells of memory that is used after it was freed, here and in every test."""
    rows = Rows()
    pages = rows.pool.pages
    with accelerator.hold(current(), until_waited=True):
        rows.store(1, 0)
        del rows  # which closes the handler
        gc.collect()
        assert set(pages[0].view(torch.int16).flatten().tolist()) == {1}


@on_fake_accelerator
def test_closing_waits_for_all_jobs(accelerator: Accelerator) -> None:
    rows = Rows()
    with accelerator.hold(current(), until_waited=True):
        jobs = [rows.store(block, block) for block in range(PAGES)]
        assert not any(job.query() for job in jobs)
        rows.handler.close()
        assert [rows.page(page) for page in range(PAGES)] == [{page} for page in range(PAGES)]
    assert [result.state for result in rows.handler.poll()] == ["done"] * PAGES


@on_fake_accelerator
def test_a_failed_copy_leaves_the_next_job_running(accelerator: Accelerator) -> None:
    rows = Rows()
    with pytest.MonkeyPatch.context() as patch:

        def fail(*_: object) -> None:
            raise RuntimeError("the device refuses")

        patch.setattr(blocks.GroupTensors, "_runs", fail)  # behind the operations that gather
        bad = rows.store(1, 0)
    good = rows.store(2, 1)
    with pytest.raises(kvs.TransferError, match="store 0 failed: the device refuses"):
        bad.synchronize()
    good.synchronize()
    assert [result.state for result in rows.handler.poll()] == ["failed", "done"]
    assert rows.page(1) == {2}


@on_fake_accelerator
def test_other_classes_name_the_reference_handler(accelerator: Accelerator) -> None:
    rows = Rows()
    for kind in (kvs.OffloadHandler, kvs.PrefixCache):
        assert one_line(kind, rows.layout, rows.pool) == (
            "ValueError: the cache is on fakeaccel:0, which only PyTorch drives; use "
            "torch_kvswap.reference.ReferenceHandler there (docs/devices.md)"
        )
