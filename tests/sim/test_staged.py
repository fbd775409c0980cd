"""Staged copies: a kernel packs blocks into a ring of staging buffers, and whole pages are
copied.
"""

from __future__ import annotations

import gc
import re

import pytest
import torch
from drained import drain
from expecttest import assert_expected_inline
from host_pools import unpinned
from logged import logged
from simulated_cache import CURRENT, needs_kernels, run_until
from simulated_driver import Driver, on_device, simulated
from staged_bytes import expect, numbers

from torch_kvswap import HostPool, OffloadHandler, TransferError

KIB, MIB = 1 << 10, 1 << 20


def steps(driver: Driver) -> str:
    """What was submitted, with names for the streams."""
    log = re.sub(r"(push|pop) context.*\n", "", driver.log())
    log = re.sub(r"stream 10[13]", "copies", log)
    return re.sub(r"stream \d+", "kernels", log)


@pytest.mark.parametrize(
    ("layers", "fragment"),
    [(3, 4096), (7, 48), (5, 18432), (3, 7), (3, 10), (2, 36), (1, 3 * MIB), (2, 700 * 1024 + 8)],
)
@pytest.mark.parametrize("staging", [MIB, 2 * MIB + 77, 32 * MIB])
@needs_kernels
@simulated
def test_every_byte_arrives_and_no_other_changes(
    driver: Driver, layers: int, fragment: int, staging: int
) -> None:
    whole = numbers(layers, 12, fragment)
    before = list(whole.clone())
    layout = on_device(driver, whole)
    with OffloadHandler(
        layout, HostPool(layout, num_pages=9), copy_method="staged", staging_bytes=staging
    ) as handler:
        expect(handler, before, [3, 11, 0, 7, 8], [4, 0, 8, 2, 3])
        assert handler.metrics().stores.jobs_by_copy_method["staged"] == 1
        assert handler.metrics().loads.jobs_by_copy_method["staged"] == 1


@pytest.mark.parametrize(
    "fragment", [5 * MIB + 24, pytest.param(9 * MIB - 512, marks=pytest.mark.slow)]
)
@needs_kernels
@simulated
def test_a_piece_spans_parts_and_whole_blocks(driver: Driver, fragment: int) -> None:
    whole = numbers(2, 9, fragment)
    before = list(whole.clone())
    layout = on_device(driver, whole)
    with OffloadHandler(
        layout, HostPool(layout, num_pages=9), copy_method="staged", staging_bytes=256 * MIB
    ) as handler:
        driver.log()
        expect(handler, before, [3, 8, 0, 7, 1, 4, 6], [4, 0, 8, 2, 3, 6, 1])
        counts = [int(count) for count in re.findall(r"pack (\d+) blocks", driver.log())]
        assert max(counts) > 2


@needs_kernels
@simulated
def test_an_unstaged_load_waits_for_a_staged_one(driver: Driver) -> None:
    """All of the first one is staged, because the layers have many distances."""
    whole, pages = numbers(16, 20, 64 * KIB), numbers(20, 5, 64 * KIB)
    layers = [whole[layer] for layer in (0, 1, 3, 7, 15)]
    layout, ids = on_device(driver, whole, layers), list(range(18))
    pool = HostPool(layout, num_pages=20)
    pool.pages.view(pages.shape).copy_(pages)
    epoch = driver.cuda.create_stream() // 1000000  # the log counts from the last reset on
    with OffloadHandler(layout, pool, copy_method="auto") as handler:
        unpacking = int(re.findall(r"create stream (\d+)", driver.log())[-1])
        driver.set_mode("manual")
        hold = driver.hold(epoch * 1000000 + unpacking)
        first = handler.load(page_ids=ids[:17], gpu_block_ids=ids[1:], after=())
        last = handler.load(page_ids=[17], gpu_block_ids=[5], after=())
        driver.run()
        driver.release(hold)
        run_until(driver, last.query)
        assert first.result is not None
        assert last.result is not None
        assert [each.result.copy_method for each in (first, last)] == ["staged", "kernel"]
        assert all(map(torch.equal, (layer[5] for layer in layers), pages[17]))
        driver.set_mode("immediate")


@needs_kernels
@simulated
def test_a_load_ignores_groups_without_blocks(
    driver: Driver,
) -> None:
    whole = [numbers(4, 6, 2048), numbers(4, 6, 2048)]
    before = whole[0].clone()
    layouts = [on_device(driver, of_group) for of_group in whole]
    pools = [HostPool(layout, num_pages=6) for layout in layouts]
    copies = driver.cuda.create_stream() + 3  # of loads: each channel makes two
    with OffloadHandler(layouts, pools, copy_method="staged") as handler:
        handler.synchronize(handler.store(gpu_block_ids=[[1], []], page_ids=[[1], []]))
        driver.set_mode("manual")
        job = handler.load(page_ids=[[1], []], gpu_block_ids=[[5], []], layer_groups=2, after=())
        while driver.step(copies):  # without the kernels
            pass
        assert not job.query()
        run_until(driver, job.query)
        assert torch.equal(whole[0][:, 5], before[:, 1])
        driver.set_mode("immediate")


@pytest.mark.parametrize("kind", ["store", "load"])
@pytest.mark.parametrize(
    "call", ["cuLaunchKernel", "cuEventRecord", "cuStreamWaitEvent", "cuEventCreate"]
)
@pytest.mark.parametrize("nth", [1, 2, 3, 5, 8])
@needs_kernels
@simulated
def test_a_failed_call_leaves_a_working_handler(
    driver: Driver, kind: str, call: str, nth: int
) -> None:
    whole = numbers(2, 12, MIB // 4)
    before = list(whole.clone())
    layout = on_device(driver, whole)
    pool = HostPool(layout, num_pages=12)
    with OffloadHandler(layout, pool, copy_method="staged", staging_bytes=4 * MIB) as handler:
        ids = [7, 2, 5, 11, 0, 9, 1, 8, 3, 10, 4, 6]  # more than the buffer holds
        events = driver.live("events")
        calls = driver.calls(call)
        driver.fail(call, nth)
        job = getattr(handler, kind)(gpu_block_ids=ids, page_ids=ids)
        while not job.query():
            pass
        failed = job.result is not None and not job.result.ok
        assert failed == (driver.calls(call) - calls >= nth)
        while driver.calls(call) - calls < nth:  # the fault is still to come
            drain(handler)
            handler.store(gpu_block_ids=[0], page_ids=[0])
        drain(handler)
        handler.poll()
        whole.copy_(torch.stack(before))
        expect(handler, before, ids[:5], [0, 1, 2, 3, 4])
        assert driver.live("events") <= events + 80


def waits_for_earlier_pieces(steps: str, first: str, second: str) -> list[int]:
    """For each piece that waits for earlier ones to leave its place: how many pieces before it the
    last of them was.

    first, second: the streams on which pieces are filled and drained.
    """
    filled, drained, waits = 0, 0, []
    drained_by: dict[str, int] = {}
    waits_for: int | None = None
    for action, event, stream in re.findall(r"(record|wait for) event (\d+) on (\w+)", steps):
        if action == "wait for" and stream == first:
            waits_for = drained_by.get(
                event
            )  # the last one that it waits for; None: of another copy
        elif action == "record" and stream == first:
            if waits_for is not None:
                waits.append(filled - waits_for)
            waits_for = None
            filled += 1
        elif action == "record" and stream == second:
            drained_by[event] = drained
            drained += 1
    return waits


@pytest.mark.parametrize("kind", ["store", "load"])
@needs_kernels
@simulated
def test_no_piece_waits_for_the_one_before_it(driver: Driver, kind: str) -> None:
    whole = numbers(5, 44, MIB // 4)
    # No edge is copied where the blocks lie in so many runs.
    layout = on_device(driver, whole, [whole[0], whole[1], whole[3], whole[4]])
    pool = HostPool(layout, num_pages=44)
    # A buffer of 8 blocks of 1 MiB for each direction.
    with OffloadHandler(layout, pool, copy_method="staged", staging_bytes=16 * MIB) as handler:
        submit = handler.store if kind == "store" else handler.load
        # From here on the pieces of a transfer begin somewhere in the buffer.
        handler.synchronize(submit(gpu_block_ids=[0, 1, 2], page_ids=[0, 1, 2], after=()))
        driver.log()
        ids = list(range(3, 44))
        handler.synchronize(submit(gpu_block_ids=ids, page_ids=ids, after=()))
        start, *pieces, end = steps(driver).splitlines()
        assert re.fullmatch(r"record event \d+ on copies", start)
        assert re.fullmatch(r"record event \d+ on \w+", end)
        sides = ("kernels", "copies") if kind == "store" else ("copies", "kernels")
        waits = waits_for_earlier_pieces("\n".join(pieces), *sides)
    assert len(waits) > 8
    assert min(waits) == 2


@needs_kernels
@simulated
def test_a_store_is_packed_during_another_copy(driver: Driver) -> None:
    whole = numbers(2, 12, 4096)
    layout = on_device(driver, whole)
    pool = HostPool(layout, num_pages=12)
    copies = driver.cuda.create_stream() + 1
    with OffloadHandler(layout, pool, copy_method="staged", staging_bytes=MIB) as handler:
        driver.set_mode("manual")
        hold = driver.hold(copies)
        for i in (1, 2):
            handler.store(gpu_block_ids=[i], page_ids=[i], after=())
        driver.run()
        pending = driver.pending()
        driver.release(hold)
        driver.set_mode("immediate")
        drain(handler)
    assert "pack" not in pending
    assert "copy" in pending
    for i in (1, 2):
        assert torch.equal(pool.pages[i, 0], whole[:, i].flatten())


@pytest.mark.parametrize("waits", ["the store", "the store before it"])
@needs_kernels
@simulated
def test_a_store_is_packed_after_its_waits(driver: Driver, waits: str) -> None:
    whole = numbers(4, 20, 64 * KIB)
    layout = on_device(driver, whole)
    pool, ids = HostPool(layout, num_pages=20), list(range(2, 19))
    driver.set_stream(0, CURRENT)
    with OffloadHandler(layout, pool, copy_method="auto", staging_bytes=16 * MIB) as handler:
        driver.set_mode("manual")
        hold = driver.hold(CURRENT)
        new = numbers(4, 64 * KIB)
        for layer in range(4):
            driver.cuda.copy(whole[layer, 2], new[layer], CURRENT)
        if waits == "the store":
            handler.store(gpu_block_ids=ids, page_ids=ids)
        else:  # no kernel packs that one
            handler.store(gpu_block_ids=[1], page_ids=[1])
            handler.store(gpu_block_ids=ids, page_ids=ids, after=())
        driver.run()
        pending = driver.pending()
        driver.release(hold)
        driver.set_mode("immediate")
        drain(handler)
        stored = pool.pages[2, 0].clone()
    assert "pack" in pending
    assert torch.equal(stored, new.flatten())


@needs_kernels
@simulated
def test_pieces_of_groups_begin_aligned_for_kernels(driver: Driver) -> None:
    """The simulated driver refuses a kernel that copies what is not aligned to its words."""
    odd, even = numbers(3, 6, 7), numbers(3, 6, 4096)  # words of 1 and of 16 bytes
    whole = numbers(3, 6, 4096 + 8)
    padded = whole[..., :4096]  # words of 8: its blocks are 4,104 bytes apart
    before = [odd.clone(), even.clone(), padded.clone()]
    layouts = [on_device(driver, odd), on_device(driver, even)]
    layouts.append(on_device(driver, whole, list(padded)))
    pools = [HostPool(layout, num_pages=6) for layout in layouts]
    with OffloadHandler(layouts, pools, copy_method="staged") as handler:
        pages = [[0, 1, 2], [5], [4]]
        handler.synchronize(handler.store(gpu_block_ids=[[1, 4, 3], [2], [1]], page_ids=pages))
        handler.synchronize(handler.load(page_ids=pages, gpu_block_ids=[[0, 2, 5], [3], [4]]))
    assert torch.equal(odd[:, [0, 2, 5]], before[0][:, [1, 4, 3]])
    assert torch.equal(even[:, 3], before[1][:, 2])
    assert torch.equal(padded[:, 4], before[2][:, 1])


@pytest.mark.parametrize("kind", ["store", "load"])
@needs_kernels
@simulated
def test_of_many_small_pieces_none_is_overwritten(driver: Driver, kind: str) -> None:
    whole, fragment = numbers(13, 56, MIB // 16), MIB // 16
    # No edge is copied where the blocks lie in so many runs.
    layout = on_device(driver, whole, [whole[i] for i in (0, 1, 3, 12)])
    pool = HostPool(layout, num_pages=56)
    pool.pages.random_(256)
    # 38 pieces of a block fill the buffer of a direction, and all the jobs run at once.
    with OffloadHandler(layout, pool, copy_method="staged", staging_bytes=20 * MIB) as handler:
        driver.set_mode("manual")
        base = driver.cuda.create_stream() // 1_000_000 * 1_000_000
        filled = base + (107 if kind == "store" else 103)  # the stream that fills the buffer
        submit = handler.store if kind == "store" else handler.load
        for i in range(56):
            submit(gpu_block_ids=[i], page_ids=[i], after=())
        metrics = handler.metrics()
        assert (metrics.stores if kind == "store" else metrics.loads).running == 56
        while driver.run(filled):  # the buffer is filled as early as it may be
            pass
        run_until(driver, lambda: handler.metrics().stores.running == 0)
        drain(handler)
        blocks = torch.stack([layout.tensors[layer] for layer in range(4)], 1)
        assert torch.equal(blocks, pool.pages.view(56, 4, fragment))
        driver.set_mode("immediate")


@pytest.mark.parametrize("held", ["store", "load"])
@needs_kernels
@simulated
def test_stores_and_loads_have_buffers_of_their_own(driver: Driver, held: str) -> None:
    whole = numbers(4, 64, MIB // 16)  # blocks of 256 KiB
    layout = on_device(driver, whole)
    pool = HostPool(layout, num_pages=64)
    pool.pages.random_(256)
    blocks, pages = whole.clone(), pool.pages.clone()
    first, last = list(range(32)), list(range(32, 64))
    with OffloadHandler(layout, pool, copy_method="staged", staging_bytes=4 * MIB) as handler:
        driver.set_mode("manual")
        base = driver.cuda.create_stream() // 1_000_000 * 1_000_000
        drains = base + (101 if held == "store" else 108)  # what it fills the buffer with stays
        hold = driver.hold(drains)
        jobs = {
            "store": handler.store(gpu_block_ids=first, page_ids=first, after=()),
            "load": handler.load(page_ids=last, gpu_block_ids=last, after=()),
        }
        run_until(driver, jobs["load" if held == "store" else "store"].query)
        assert not jobs[held].query()
        driver.release(hold)
        run_until(driver, jobs[held].query)
        driver.set_mode("immediate")
    assert torch.equal(pool.pages[first, 0], blocks[:, first].transpose(0, 1).reshape(32, -1))
    assert torch.equal(whole[:, last].transpose(0, 1).reshape(32, -1), pages[last, 0])


@needs_kernels
@simulated
def test_the_memory_goes_with_the_handler(driver: Driver) -> None:
    layout = on_device(driver, numbers(2, 6, 4096))
    handler = OffloadHandler(
        layout, HostPool(layout, num_pages=6), copy_method="staged", staging_bytes=32 * MIB
    )
    handler.synchronize(handler.store(gpu_block_ids=[1], page_ids=[1]))
    streams = driver.live("streams")
    driver.log()
    handler.close()
    log = driver.log()
    assert f"free {32 * MIB} bytes" in log
    assert "free 64 bytes" in log  # the table of slabs
    assert (driver.live("streams"), driver.live("events")) == (streams - 8, 0)


@needs_kernels
@simulated
def test_memory_stays_when_copies_may_still_run(driver: Driver) -> None:
    layout = on_device(driver, numbers(2, 6, 4096))
    pool = HostPool(layout, num_pages=6, verify="load")  # which the load reads in the end
    with OffloadHandler(layout, pool, copy_method="staged") as handler:
        driver.set_mode("manual")
        job = handler.load(page_ids=[1], gpu_block_ids=[1])
        driver.fail("cuEventQuery", code=700)
        with pytest.raises(TransferError, match="the device is lost"):
            handler.synchronize(job)
        driver.log()
    del handler, job  # the native handler too
    gc.collect()
    log = driver.log()
    assert "destroy stream" in log
    assert "free" not in log
    driver.set_mode("immediate")


@needs_kernels
@simulated
def test_without_staging_memory_the_choice_goes_on(driver: Driver) -> None:
    layout = on_device(driver, numbers(8, 6, 4096))
    driver.fail("cuMemAlloc", 1, 2)
    with pytest.raises(ValueError, match="CUDA_ERROR_SIMULATED") as refusal:
        OffloadHandler(layout, HostPool(layout, num_pages=6), copy_method="staged")
    assert_expected_inline(
        str(refusal.value),
        """copy_method='staged' cannot be had: cuMemAlloc of 256 bytes: CUDA_ERROR_SIMULATED (2): made up by the simulated driver""",
    )
    with OffloadHandler(layout, HostPool(layout, num_pages=6)) as handler:
        job = handler.store(gpu_block_ids=[1], page_ids=[1])
        handler.synchronize(job)
        assert job.result is not None
        assert job.result.copy_method == "strided"


@needs_kernels
@simulated
def test_less_staging_memory_is_used_with_a_warning(
    driver: Driver,
) -> None:
    whole = numbers(2, 24, MIB // 4)
    layout = on_device(driver, whole)
    before = list(whole.clone())
    driver.limit_allocations(5 * MIB)
    with (
        logged() as messages,
        OffloadHandler(
            layout,
            HostPool(layout, num_pages=24),
            copy_method="staged",
            staging_bytes=32 * MIB,
        ) as handler,
    ):
        driver.log()
        expect(handler, before, list(range(12)), list(range(12, 24)))
        log = driver.log()
    (message,) = messages
    assert_expected_inline(
        message,
        """transfers are slower while long kernels run, with the 4194304 bytes of GPU memory for staging that could be had: cuMemAlloc of 33554432 bytes for staging (staging_bytes): CUDA_ERROR_SIMULATED (2): made up by the simulated driver (docs/copy_methods.md)""",
    )
    blocks = [int(count) for count in re.findall(r"pack (\d+) blocks", log)]
    assert max(blocks) == 2, "a piece has 1 MiB at most"
    assert f"free {4 * MIB} bytes" in driver.log()


@needs_kernels
@simulated
def test_pageable_pools_and_small_staging_are_refused(driver: Driver) -> None:
    layout = on_device(driver, numbers(8, 6, 4096))
    with pytest.raises(ValueError, match="copy_method='staged'") as refusal:
        OffloadHandler(layout, unpinned(layout, num_pages=6), copy_method="staged")
    assert_expected_inline(
        str(refusal.value), """copy_method='staged' cannot be had: the host pages are not pinned"""
    )
    with pytest.raises(ValueError, match="copy_method='staged'") as refusal:
        OffloadHandler(
            layout, HostPool(layout, num_pages=6), copy_method="staged", staging_bytes=100
        )
    assert_expected_inline(
        str(refusal.value),
        """copy_method='staged' cannot be had: staging_bytes=100 is too little; give it 1048576 or more""",
    )
