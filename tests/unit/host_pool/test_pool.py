"""Host pools have the exact size, are pinned while they are open, and outlive their views."""

from __future__ import annotations

import gc
import os
import textwrap
from pathlib import Path

import pytest
import torch
from error_text import error_text
from expecttest import assert_expected_inline
from fake_procfs import write
from host_pools import in_chunks
from hypothesis import given
from hypothesis import strategies as st
from logged import logged
from processes import in_child, live_fork
from simulated_driver import HOST, Driver, place, simulated
from simulated_driver.cuda import CudaError

from torch_kvswap._native.loader import native
from torch_kvswap.host_pool import system
from torch_kvswap.host_pool.memory import Registration, map_new
from torch_kvswap.host_pool.pinning import ONE_CHUNK
from torch_kvswap.host_pool.pool import HostPool
from torch_kvswap.host_pool.shape import PoolShape
from torch_kvswap.layout import PagedLayout
from torch_kvswap.offload.handler import OffloadHandler


def make_layout(row_bytes: int = 656, device: str = "cpu") -> PagedLayout:
    return PagedLayout([torch.zeros(4, row_bytes, dtype=torch.uint8, device=device)])


def mapped_bytes(address: int) -> int:
    """The size of the mapping that begins at the address."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(end, 16) for end in line.split()[0].split("-"))
        if first == address:
            return last - first
    raise AssertionError(f"nothing is mapped at {address:#x}")


def whole_pages(nbytes: int) -> int:
    page = os.sysconf("SC_PAGE_SIZE")
    return -(-nbytes // page) * page


def test_pages_have_the_asked_size_and_are_zero() -> None:
    pool = HostPool(make_layout(), num_pages=5, blocks_per_page=3)
    assert pool.pages.shape == (5, 3, 656)
    assert pool.pages.dtype == torch.uint8
    assert (pool.page_bytes, pool.nbytes) == (1968, 9840)
    assert not pool.pages.any()
    assert not pool.is_pinned


def test_the_memory_goes_with_its_last_view() -> None:
    pool = HostPool(make_layout(), num_pages=100_000)
    view = pool.pages[0]
    address = view.data_ptr()
    pool.close()
    size = mapped_bytes(address)
    del view
    gc.collect()
    assert size >= pool.nbytes
    with pytest.raises(AssertionError, match="nothing is mapped"):
        mapped_bytes(address)


def test_a_closed_pool_says_so() -> None:
    with HostPool(make_layout(), num_pages=1) as pool:
        pass
    pool.close()
    assert not pool.is_pinned
    for use in (
        lambda: pool.pages,
        lambda: pool.is_ready,
        lambda: pool.num_ready_pages,
        lambda: pool.read_block(0),
        pool.wait_ready,
    ):
        with pytest.raises(RuntimeError, match=r"^the host pool is closed; make a new one$"):
            use()


def test_more_than_the_machine_has_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "proc/meminfo", "MemTotal: 65536 kB\nMemAvailable: 4096 kB\n")
    monkeypatch.setattr(system, "ROOT", tmp_path)
    assert_expected_inline(
        error_text(HostPool, make_layout(), num_pages=10_000),
        """\
NoRoomError: the pages need 6560000 bytes of host memory, of which 4194304 bytes are
available (MemAvailable in /proc/meminfo); ask for fewer pages (num_pages=6393 fits), or
end what uses the memory""",
    )


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_a_forked_child_cannot_use_the_pool() -> None:
    pool = HostPool(make_layout(), 1)
    uses = (
        lambda: pool.pages,
        lambda: pool.is_ready,
        lambda: pool.is_pinned,
        lambda: pool.read_block(0),
        lambda: pool.view_for(make_layout()),
        pool.share,
        pool.wait_ready,
        pool.close,
    )
    refused = "RuntimeError: this host pool belongs to process"
    assert in_child(lambda: all(error_text(use).startswith(refused) for use in uses)) == 1


def test_waiting_for_too_many_pages_is_refused() -> None:
    pool = HostPool(make_layout(), 4)
    assert pool.wait_ready(0, pages=4)
    assert_expected_inline(
        error_text(pool.wait_ready, 0, pages=5), """ValueError: pages is 5; it must be 0 to 4"""
    )


# Pinning, where the simulated driver writes down what it is told


def on_gpu(driver: Driver, row_bytes: int = 128) -> PagedLayout:
    return place(driver, make_layout(row_bytes))


@simulated
def test_a_dropped_pool_is_unregistered_while_mapped(driver: Driver) -> None:
    pool = HostPool(on_gpu(driver), num_pages=1000)
    address = pool.pages.data_ptr()
    unregister = native.unregister_host
    mapped = []

    def look(device: int, address: int) -> None:
        mapped.append(mapped_bytes(address))
        unregister(device, address)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "unregister_host", look)
        del pool
        gc.collect()
    assert mapped == [whole_pages(128_000)]
    assert driver.calls("cuMemHostUnregister") == 1
    with pytest.raises(AssertionError, match="nothing is mapped"):
        mapped_bytes(address)


@simulated
def test_handlers_are_closed_before_the_memory_is_unregistered(driver: Driver) -> None:
    class Handler:
        def close(self) -> None:
            closed.append(driver.cuda.memory_type(view))

    closed: list[int] = []
    pool = HostPool(on_gpu(driver), num_pages=1)
    view = pool.pages
    handlers = [Handler(), Handler()]
    for handler in handlers:
        pool._register_user(handler)
    pool.close()
    assert closed == [HOST, HOST]
    assert driver.cuda.memory_type(view) == 0


def test_a_handler_that_cannot_close_keeps_the_memory() -> None:
    class Handler:
        def close(self) -> None:
            closed.append(id(self))
            raise RuntimeError("the device is lost")

    closed: list[int] = []
    pool = HostPool(make_layout(), num_pages=1)
    handlers = [Handler(), Handler()]
    for handler in handlers:
        pool._register_user(handler)
    with pytest.raises(RuntimeError, match="the device is lost"):
        pool.close()
    assert sorted(closed) == sorted(map(id, handlers))
    assert not pool.pages.any()  # it is open


@simulated
def test_refused_pages_are_pageable_with_one_warning(driver: Driver) -> None:
    driver.fail("cuMemHostRegister", code=2)
    with pytest.MonkeyPatch.context() as patch, logged() as messages:
        patch.setattr(system, "memlock_limit", lambda: 1000)
        pool = HostPool(on_gpu(driver), num_pages=10)
    assert len(messages) == 1
    assert_expected_inline(
        textwrap.fill(messages[0], 88),
        """\
the driver did not pin 1280 bytes of host memory for cuda:0: cuMemHostRegister:
CUDA_ERROR_SIMULATED (2): made up by the simulated driver; raise the limit on locked
memory, 1000 bytes (ulimit -l unlimited; in a container --ulimit memlock=-1), ask for
fewer pages. The pages are pageable now: the driver copies them through its own buffers
and blocks the submitting thread, and kernels cannot access them""",
    )
    assert not pool.is_pinned
    assert (pool.num_ready_pages, pool.wait_ready()) == (10, True)
    assert pool._ready_range.chunk_blocks == ONE_CHUNK  # no seam splits a copy
    with OffloadHandler(pool_layout := on_gpu(driver), pool) as handler:
        handler.synchronize(handler.store(gpu_block_ids=[0, 1], page_ids=[8, 9]))
        assert torch.equal(pool.pages[8, 0], pool_layout.tensors[0][0])
        assert driver.calls("cuMemcpyAsync") > 0


@simulated
def test_a_failed_unregistration_warns_and_names_the_bytes(driver: Driver) -> None:
    pool = HostPool(on_gpu(driver), num_pages=1)
    driver.fail("cuMemHostUnregister", code=2)
    with logged() as messages:
        pool.close()
    assert_expected_inline(
        textwrap.fill(messages[0], 88),
        """\
the driver did not unpin 128 bytes of host memory: cuMemHostUnregister:
CUDA_ERROR_SIMULATED (2): made up by the simulated driver; they stay locked until the
process ends""",
    )


@simulated
def test_pinning_does_not_spoil_a_capture(driver: Driver) -> None:
    layout = on_gpu(driver)
    driver.set_global_capture(True)
    pool = HostPool(layout, num_pages=1)
    pool.close()
    assert driver.capture_spoilt == 0
    with pytest.raises(CudaError):  # the control: without our mode
        driver.cuda.check("cuMemHostRegister", layout.tensors[0].data_ptr(), 1, 1)
    assert driver.capture_spoilt == 1


@pytest.mark.gpu
def test_a_refused_registration_leaves_no_error_behind() -> None:
    layout = make_layout(device="cuda:0")
    mapping = map_new(1 << 20, 1 << 20, shared=False)
    one, other = (Registration(mapping, layout.device) for _ in range(2))
    assert one.add(0, mapping.nbytes) is None
    assert "cuMemHostRegister" in (other.add(0, mapping.nbytes) or "")  # it is pinned already
    ones = torch.ones(1000, device="cuda:0").add_(1)
    torch.cuda.synchronize()
    assert ones.eq(2).all().item()
    one.remove()


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_a_fork_leaves_the_gpu_its_pages() -> None:
    layout = make_layout(row_bytes=1 << 20, device="cuda:0")
    with HostPool(layout, num_pages=16) as pool, OffloadHandler(layout, pool) as handler:
        pool.pages.fill_(1)
        with live_fork():
            # A page that was copied here would no longer be the one that is pinned.
            pool.pages.fill_(2)
            handler.synchronize(handler.load(page_ids=[3, 15], gpu_block_ids=[0, 1]))
            assert layout.tensors[0][:2].eq(2).all().item()


@pytest.mark.gpu
@pytest.mark.parametrize("shared", [False, True])
def test_every_kind_of_memory_is_pinned_and_copied(shared: bool) -> None:
    layout = make_layout(row_bytes=1 << 20, device="cuda:0")
    layout.tensors[0].random_(256)
    with (
        in_chunks(16 << 20, layout, 64, shared=shared) as pool,
        OffloadHandler(layout, pool) as handler,
    ):
        assert pool.is_pinned
        handler.synchronize(handler.store(gpu_block_ids=[0, 1, 2], page_ids=[15, 16, 63]))
        assert torch.equal(pool.pages[[15, 16, 63], 0], layout.tensors[0][:3].cpu())


# How many bytes a page has, and how many pages make a chunk.


SYSTEM_PAGE = os.sysconf("SC_PAGE_SIZE")


def layout(row_bytes: int = 64) -> PagedLayout:
    return PagedLayout([torch.zeros(2, row_bytes, dtype=torch.uint8)])


@given(st.integers(1, 3 * SYSTEM_PAGE), st.integers(1, 1 << 24))
def test_chunks_end_between_pages_of_the_system(row_bytes: int, chunk_bytes: int) -> None:
    shape = PoolShape(layout(row_bytes), 1, 1)
    chunk = shape.chunk_of(chunk_bytes)
    assert chunk & (chunk - 1) == 0
    assert chunk * row_bytes % SYSTEM_PAGE == 0
    is_least = chunk == 1 or chunk // 2 * row_bytes % SYSTEM_PAGE != 0
    assert is_least or chunk_bytes // 2 < chunk * row_bytes <= chunk_bytes
