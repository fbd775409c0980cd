"""Pools are pinned in chunks: no copy crosses a chunk's end, and refused chunks are tried again."""

from __future__ import annotations

import gc
import os
import threading
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from error_text import error_text
from expecttest import assert_expected_inline
from fake_procfs import write
from host_pools import in_chunks, registered
from logged import logged
from patience import PATIENCE, in_time
from pinning_steps import PinningSteps
from simulated_cache import needs_kernels
from simulated_driver import DEVICE, Driver, place, simulated

from torch_kvswap._native.loader import native
from torch_kvswap.host_pool import system
from torch_kvswap.host_pool.memory import Mapping
from torch_kvswap.host_pool.pool import HostPool
from torch_kvswap.host_pool.shape import EXCHANGE_BYTES
from torch_kvswap.layout import PagedLayout
from torch_kvswap.offload.handler import OffloadHandler
from torch_kvswap.ops import swap_blocks, swap_blocks_batch

MIB = 1 << 20
BLOCK = 4096


def gpu_cache(driver: Driver, blocks: int = 16, layers: int = 2) -> PagedLayout:
    """Blocks of BLOCK bytes together, with random bytes."""
    rows = [torch.randint(256, (blocks, BLOCK // layers), dtype=torch.uint8) for _ in range(layers)]
    return place(driver, PagedLayout(rows))


@simulated
def test_chunks_are_registered_one_after_another(driver: Driver) -> None:
    steps = PinningSteps()
    pool = in_chunks(5 * BLOCK, gpu_cache(driver), 11)  # of 4 pages: a power of two
    assert registered(driver) == [4 * BLOCK, 4 * BLOCK, 3 * BLOCK]
    assert steps.seen == [0, 4, 8, 11]
    assert pool.is_pinned
    pool.close()
    assert driver.calls("cuMemHostUnregister") == 3
    assert not pool.is_pinned


@simulated
@pytest.mark.parametrize(
    "copy_method",
    [
        *("auto", "batch", "strided"),
        pytest.param("staged", marks=needs_kernels),
        pytest.param("kernel", marks=needs_kernels),
    ],
)
def test_no_copy_crosses_the_end_of_a_chunk(driver: Driver, copy_method: str) -> None:
    layout = gpu_cache(driver, layers=1)  # neighbours on both sides
    with in_chunks(4 * BLOCK, layout, 8, blocks_per_page=2) as pool:
        assert registered(driver) == [4 * BLOCK] * 4
        assert pool._ready_range.chunk_blocks == 4
        handler = OffloadHandler(layout, pool, copy_method=copy_method)
        kept = [tensor.clone() for tensor in layout.tensors]
        handler.synchronize(handler.store(gpu_block_ids=list(range(16)), page_ids=list(range(8))))
        for tensor in layout.tensors:
            tensor.zero_()
        handler.synchronize(handler.load(page_ids=list(range(8)), gpu_block_ids=list(range(16))))
        assert all(map(torch.equal, layout.tensors, kept))


@simulated
def test_inside_of_a_chunk_neighbours_are_one_copy(driver: Driver) -> None:
    layout = gpu_cache(driver, layers=1)
    with in_chunks(4 * BLOCK, layout, 16) as pool:
        handler = OffloadHandler(layout, pool, copy_method="batch")
        driver.log()
        handler.synchronize(handler.store(gpu_block_ids=list(range(16)), page_ids=list(range(16))))
        assert "batch of 4 on stream" in driver.log()
        handler.synchronize(handler.store(gpu_block_ids=[0, 1, 2, 3], page_ids=[2, 3, 4, 5]))
        assert "batch of 2 on stream" in driver.log()


@simulated
def test_an_op_keeps_to_the_chunks_too(driver: Driver) -> None:
    layout = gpu_cache(driver, layers=1)
    with in_chunks(4 * BLOCK, layout, 16) as pool:
        pages, cache = pool.pages.view(16, BLOCK), driver.memory(16 * BLOCK, DEVICE)
        sources = torch.tensor([pages[page].data_ptr() for page in range(16)])
        sizes = torch.full((16,), BLOCK)
        pages.random_()
        swap_blocks_batch(sources, cache.data_ptr() + torch.arange(16) * BLOCK, sizes)
        assert torch.equal(cache.view(16, BLOCK), pages)


# What the driver refuses


def megabytes(driver: Driver, num_pages: int = 64, **options: Any) -> HostPool:
    """Pages of 1 MiB, in chunks of 32 MiB."""
    rows = torch.zeros(2, MIB, dtype=torch.uint8)
    return in_chunks(32 * MIB, place(driver, PagedLayout([rows])), num_pages, **options)


@simulated
def test_a_refused_chunk_is_tried_again_in_halves(driver: Driver) -> None:
    driver.limit_registration(in_one=16 * MIB)
    pool = megabytes(driver)
    assert registered(driver) == [16 * MIB] * 4
    assert pool._ready_range.chunk_blocks == 16
    assert pool.is_pinned
    pool.close()


@simulated
def test_what_was_pinned_goes_with_the_rest(driver: Driver) -> None:
    driver.limit_registration(in_all=40 * MIB)
    with logged() as messages:
        pool = megabytes(driver)
    assert len(messages) == 1
    assert "The pages are pageable now" in messages[0]
    assert driver.calls("cuMemHostUnregister") == 1
    assert not pool.is_pinned
    assert pool.num_ready_pages == 64


@simulated
def test_pages_are_placed_on_the_gpus_node_once(driver: Driver) -> None:
    layout, nodes = gpu_cache(driver), []
    bind = lambda address, nbytes, node: nodes.append((nbytes, node)) or True  # noqa: E731
    for attribute, value in ((50, 0), (33, 1), (34, 2)):  # PCI domain, bus and device
        driver.set_attribute(attribute, value)
    with TemporaryDirectory() as root, pytest.MonkeyPatch.context() as patch:
        patch.setattr(system, "ROOT", Path(root))
        patch.setattr(native, "bind_host", bind)
        write(Path(root), "sys/bus/pci/devices/0000:01:02.0/numa_node", "3\n")
        Path(root, "proc").mkdir()  # pools take turns there
        HostPool(layout, 1).close()
        with HostPool(layout, 2, shared=True) as maker:
            HostPool.attach(layout, maker.share()).close()  # its pages are placed already
    assert nodes == [(BLOCK, 3), (2 * BLOCK + EXCHANGE_BYTES, 3)]


@simulated
@pytest.mark.parametrize("pin_in_background", [False, True])
def test_memory_that_is_not_there_ends_the_pinning(driver: Driver, pin_in_background: bool) -> None:
    touch = Mapping.touch

    def fail(mapping: Mapping, first: int, last: int) -> None:
        if first == 32 * MIB:
            raise RuntimeError("there is no memory")
        touch(mapping, first, last)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Mapping, "touch", fail)
        if pin_in_background:
            with logged() as messages:
                pool = megabytes(driver, pin_in_background=True)
                assert in_time(lambda: len(messages) == 1)
            assert_expected_inline(
                error_text(pool.wait_ready, PATIENCE),
                """\
RuntimeError: 32 of 64 host pages are pinned, and no more will be: there is no memory""",
            )
            assert messages[0].endswith("and the others cannot be used: there is no memory")
            pool.close()
        else:
            assert error_text(megabytes, driver) == "RuntimeError: there is no memory"
    assert driver.calls("cuMemHostRegister") == driver.calls("cuMemHostUnregister") == 1


@simulated
def test_smaller_chunks_end_where_copies_are_split(driver: Driver) -> None:
    steps = PinningSteps()
    layout = place(driver, PagedLayout([torch.zeros(2, MIB, dtype=torch.uint8)]))
    driver.limit_registration(in_one=16 * MIB)
    pool = in_chunks(32 * MIB, layout, 33, pin_in_background=True)
    assert steps.seen[1] == 16
    assert pool.wait_ready(PATIENCE, pages=32)
    assert not pool.wait_ready(0, pages=33)
    steps.pin_more(3)
    assert pool.wait_ready(PATIENCE)
    assert registered(driver) == [16 * MIB, 16 * MIB, 1 * MIB]
    pool.close()


# In the background


@simulated
def test_pages_are_ready_from_the_front(driver: Driver) -> None:
    steps = PinningSteps()
    pool = megabytes(driver, 128, pin_in_background=True)
    assert steps.seen[1] == 32
    assert pool.wait_ready(PATIENCE, pages=64)
    assert (pool.num_ready_pages, pool.is_ready, pool.is_pinned) == (64, False, False)
    assert not pool.wait_ready(timeout=0.01)
    assert not pool.wait_ready(timeout=0.01, pages=65)
    steps.pin_more(3)
    assert pool.wait_ready()
    assert (pool.num_ready_pages, pool.is_ready, pool.is_pinned) == (128, True, True)
    assert steps.seen == [0, 32, 64, 96, 128]
    pool.close()
    assert driver.calls("cuMemHostUnregister") == 4


@simulated
def test_a_job_may_use_only_ready_pages(driver: Driver) -> None:
    steps = PinningSteps()
    rows = torch.arange(2, dtype=torch.uint8).repeat_interleave(MIB).view(2, MIB)
    layout = place(driver, PagedLayout([rows]))
    pool = in_chunks(32 * MIB, layout, 96, pin_in_background=True)
    assert pool.wait_ready(PATIENCE, pages=64)
    with OffloadHandler(layout, pool) as handler:
        handler.synchronize(
            handler.store(gpu_block_ids=[0, 1], page_ids=[31, 32])
        )  # on both sides of a seam
        assert_expected_inline(
            error_text(handler.store, gpu_block_ids=[0, 1], page_ids=[5, 64]),
            """\
IndexError: page_ids[1] is 64, which is not pinned yet: pages 0 to 63 are;
HostPool.wait_ready(pages=65) waits for it""",
        )
        assert_expected_inline(
            error_text(handler.load, page_ids=[95], gpu_block_ids=[0]),
            """\
IndexError: page_ids[0] is 95, which is not pinned yet: pages 0 to 63 are;
HostPool.wait_ready(pages=96) waits for it""",
        )
        assert_expected_inline(
            error_text(pool.read_block, 95),
            """\
IndexError: page is 95, which is not pinned yet: pages 0 to 63 are;
HostPool.wait_ready(pages=96) waits for it""",
        )
        steps.pin_more(2)
        assert pool.wait_ready(PATIENCE)
        handler.synchronize(handler.store(gpu_block_ids=[1], page_ids=[95]))
        assert [int(pool.pages[page].unique()) for page in (31, 32, 95)] == [0, 1, 1]
    pool.close()


@simulated
def test_closing_ends_pinning_and_waiting(driver: Driver) -> None:
    steps = PinningSteps()
    pool = megabytes(driver, 128, pin_in_background=True)
    assert pool.wait_ready(PATIENCE, pages=64)
    said: list[str] = []
    waiter = threading.Thread(target=lambda: said.append(error_text(pool.wait_ready, 1e300)))
    waiter.start()
    closer = threading.Thread(target=pool.close)
    closer.start()
    steps.pin_more(3)
    for thread in (waiter, closer):
        thread.join(PATIENCE)
        assert not thread.is_alive()
    assert_expected_inline(
        said[0],
        """RuntimeError: 64 of 128 host pages are pinned, and no more will be: the pool was closed""",
    )
    assert driver.calls("cuMemHostRegister") == driver.calls("cuMemHostUnregister") == 2


@simulated
def test_a_pool_dropped_while_it_is_pinned_goes(driver: Driver) -> None:
    pool = megabytes(driver, 128, pin_in_background=True)
    del pool
    gc.collect()
    names = [thread.name for thread in threading.enumerate()]
    assert not [name for name in names if name.startswith("kvswap")]
    assert driver.calls("cuMemHostRegister") == driver.calls("cuMemHostUnregister") > 0


@simulated
def test_closing_waits_for_the_thread_that_touches_pages(driver: Driver) -> None:
    steps, turn = PinningSteps(), threading.Semaphore(0)
    touch = Mapping.touch

    def wait_and_touch(mapping: Mapping, first: int, last: int) -> None:
        if first == 64 * MIB:
            assert turn.acquire(timeout=PATIENCE)
        touch(mapping, first, last)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Mapping, "touch", wait_and_touch)
        pool = megabytes(driver, 128, pin_in_background=True)
        assert pool.wait_ready(PATIENCE, pages=64)
        closer = threading.Thread(target=pool.close)
        closer.start()
        steps.pin_more(3)
        closer.join(0.1)
        assert closer.is_alive()
        turn.release()
        closer.join(PATIENCE)
        assert not closer.is_alive()


@simulated
def test_pages_refused_in_the_background_are_never_ready(driver: Driver) -> None:
    steps = PinningSteps()
    with pytest.MonkeyPatch.context() as patch, logged() as messages:
        patch.setattr(system, "memlock_limit", lambda: None)
        pool = megabytes(driver, 128, pin_in_background=True)
        assert pool.wait_ready(PATIENCE, pages=64)
        driver.limit_registration(in_all=64 * MIB)
        steps.pin_more(3)
        text = error_text(pool.wait_ready, PATIENCE)
        assert in_time(lambda: len(messages) == 1)
    assert_expected_inline(
        text,
        """\
RuntimeError: 64 of 128 host pages are pinned, and no more will be: cuMemHostRegister:
CUDA_ERROR_SIMULATED (2): made up by the simulated driver""",
    )
    assert_expected_inline(
        messages[0],
        """64 of 128 host pages are pinned, and the others cannot be used: cuMemHostRegister: CUDA_ERROR_SIMULATED (2): made up by the simulated driver; ask for fewer pages""",
    )
    assert pool.num_ready_pages == 64
    assert pool.wait_ready(0, pages=64)
    pool.close()
    assert driver.calls("cuMemHostUnregister") == 2


@simulated
def test_the_first_chunk_decides_about_pageable_pages(driver: Driver) -> None:
    driver.limit_registration(in_all=0)
    with logged() as messages:
        pool = megabytes(driver, pin_in_background=True)
    assert "The pages are pageable now" in messages[0]
    assert pool.is_ready


@simulated
def test_a_fork_while_pages_are_pinned_is_safe(driver: Driver) -> None:
    steps = PinningSteps()
    pool = megabytes(driver, 128, pin_in_background=True)
    child = os.fork()
    if child == 0:
        said = error_text(pool.wait_ready)
        del pool
        gc.collect()
        os._exit(driver.calls("cuMemHostUnregister") or "cannot be used" not in said)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    steps.pin_more(3)
    assert pool.wait_ready(PATIENCE)
    assert pool.is_pinned
    pool.close()


@pytest.mark.gpu
def test_copies_across_seams_are_right_on_a_gpu() -> None:
    rows = [torch.randint(256, (64, MIB // 2), dtype=torch.uint8, device="cuda") for _ in range(2)]
    layout = PagedLayout(rows)
    kept = [tensor.clone() for tensor in rows]
    ids = list(range(64))
    for copy_method in ("batch", "strided", "auto"):
        pool = in_chunks(4 * MIB, layout, 64, pin_in_background=True)
        assert pool.wait_ready(60)
        assert pool.is_pinned
        with pool, OffloadHandler(layout, pool, copy_method=copy_method) as handler:
            handler.synchronize(handler.store(gpu_block_ids=ids, page_ids=ids))
            for tensor in rows:
                tensor.zero_()
            handler.synchronize(handler.load(page_ids=ids, gpu_block_ids=ids))
            assert all(map(torch.equal, rows, kept))


@pytest.mark.gpu
def test_swap_blocks_keeps_to_chunks_on_a_gpu() -> None:
    cache = torch.zeros(64, MIB, dtype=torch.uint8, device="cuda")
    with in_chunks(4 * MIB, PagedLayout([cache]), 64) as pool:
        pages = pool.pages.view(64, MIB).random_()
        swap_blocks(pages, cache, MIB, torch.arange(64).repeat(2, 1).T.contiguous())
        assert torch.equal(cache.cpu(), pages)
