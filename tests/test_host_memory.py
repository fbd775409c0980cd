"""Host pages have the exact size, are pinned while the pool is open, and outlive their views."""

from __future__ import annotations

import gc
import os
import re
import weakref
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from expecttest import assert_expected_inline
from refusal import refusal

from torch_kvswap import host_memory
from torch_kvswap.host_memory import HostPool
from torch_kvswap.layout import PagedLayout, Planes


def make_layout(row_bytes: int = 656, device: str = "cpu") -> PagedLayout:
    return PagedLayout([torch.zeros(4, row_bytes, dtype=torch.uint8, device=device)])


def mapped_bytes(address: int) -> int:
    """The size of the mapping that begins at the address."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(end, 16) for end in line.split()[0].split("-"))
        if first == address:
            return last - first
    raise AssertionError(f"nothing is mapped at {address:#x}")


def test_pages_have_the_asked_size_and_are_zero() -> None:
    pool = HostPool(make_layout(), num_pages=5, blocks_per_page=3)
    assert pool.pages.shape == (5, 3, 656)
    assert pool.pages.dtype == torch.uint8
    assert (pool.page_bytes, pool.nbytes) == (1968, 9840)
    assert not pool.pages.any()
    assert not pool.is_pinned


def test_the_memory_is_not_rounded_up_to_a_power_of_two() -> None:
    pool = HostPool(make_layout(), num_pages=100_000)
    page = os.sysconf("SC_PAGE_SIZE")
    assert mapped_bytes(pool.pages.data_ptr()) == -(-pool.nbytes // page) * page


def test_planes_of_a_block_lie_one_after_another() -> None:
    tensors = [torch.zeros(4, width, dtype=torch.uint8) for width in (3, 8, 5)]
    pool = HostPool(PagedLayout(tensors), num_pages=2, blocks_per_page=2)
    start = pool.pages.data_ptr()
    assert pool.layout.bases.tolist() == [start, start + 3, start + 11]
    assert pool.layout.strides.tolist() == [16, 16, 16]
    assert pool.layout.sizes.tolist() == [3, 8, 5]
    assert (pool.layout.num_blocks, pool.layout.block_bytes) == (4, 16)


def test_a_view_outlives_the_pool() -> None:
    pool = HostPool(make_layout(), num_pages=100)
    view = pool.pages[50:]
    pool.close()
    del pool
    gc.collect()
    view.fill_(7)
    assert int(view.sum(dtype=torch.int64)) == 7 * view.numel()


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
    with pytest.raises(RuntimeError, match="the host pool is closed; make a new one"):
        _ = pool.pages


def test_no_pages_are_refused() -> None:
    assert_expected_inline(
        refusal(HostPool, make_layout(), num_pages=0),
        """ValueError: num_pages=0, blocks_per_page=1: both must be at least 1""",
    )


def test_pages_without_blocks_are_refused() -> None:
    assert_expected_inline(
        refusal(HostPool, make_layout(), 1, blocks_per_page=0),
        """ValueError: num_pages=1, blocks_per_page=0: both must be at least 1""",
    )


def test_more_than_the_machine_has_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory.os, "sysconf", lambda name: 2048)  # 4 MiB are installed
    assert_expected_inline(
        refusal(HostPool, make_layout(), num_pages=10_000),
        """\
ValueError: the pages need 6560000 bytes of host memory, this machine has 4194304; ask
for fewer pages""",
    )


def test_pinning_for_a_cache_on_the_cpu_is_refused() -> None:
    assert_expected_inline(
        refusal(HostPool, make_layout(), 1, pinned=True),
        """ValueError: pinned=True needs a cache on CUDA, this one is on cpu; leave it out""",
    )


class FakeCudart:
    def __init__(self) -> None:
        self.log: list[str] = []
        self.code = 0
        self.address = 0

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802
        self.address = address
        self.log.append(f"register {nbytes} bytes, flags {flags}")
        return self.code

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        self.log.append("unregister")
        return self.code

    def cudaGetErrorString(self, code: int) -> str:  # noqa: N802
        return "out of memory"


@pytest.fixture
def cudart(monkeypatch: pytest.MonkeyPatch) -> FakeCudart:
    fake = FakeCudart()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: fake)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(
        host_memory, "_clear_last_error", lambda device: fake.log.append("clear the error")
    )
    return fake


def make_cuda_layout() -> PagedLayout:
    """Stands for a layout on a GPU, which the fake runtime never touches."""
    sizes = np.array([100, 28], np.int64)
    planes = Planes(bases=sizes, strides=sizes, sizes=sizes, num_blocks=4)
    planes.device = torch.device("cuda:0")  # type: ignore[attr-defined]
    return planes  # type: ignore[return-value]


def test_the_whole_range_is_registered_once_and_unregistered_once(cudart: FakeCudart) -> None:
    pool = HostPool(make_cuda_layout(), num_pages=10, blocks_per_page=2)
    assert cudart.log == ["register 2560 bytes, flags 1"]
    pool.close()
    pool.close()
    del pool
    gc.collect()
    assert cudart.log == ["register 2560 bytes, flags 1", "unregister"]


def test_pageable_memory_is_not_registered(cudart: FakeCudart) -> None:
    HostPool(make_cuda_layout(), num_pages=1, pinned=False).close()
    assert cudart.log == []


def test_a_dropped_pool_is_unregistered_while_its_memory_is_still_there(
    cudart: FakeCudart, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = HostPool(make_cuda_layout(), num_pages=10)
    monkeypatch.setattr(cudart, "cudaHostUnregister", lambda p: int(mapped_bytes(p) < 1280))
    del pool
    gc.collect()  # a code that is not 0 would warn, and warnings are errors


def test_handlers_are_closed_before_the_memory_is_unregistered(cudart: FakeCudart) -> None:
    class Handler:
        def close(self) -> None:
            cudart.log.append("close the handler")

    pool = HostPool(make_cuda_layout(), num_pages=1)
    handlers = [Handler(), Handler()]
    for handler in handlers:
        pool.attach(handler)  # type: ignore[arg-type]
    pool.close()
    assert cudart.log[1:] == ["close the handler", "close the handler", "unregister"]


def test_the_pool_does_not_keep_its_handlers() -> None:
    class Handler:
        pass

    pool = HostPool(make_layout(), num_pages=1)
    handler = Handler()
    pool.attach(handler)  # type: ignore[arg-type]
    reference = weakref.ref(handler)
    del handler
    assert reference() is None


def test_a_failed_registration_says_why_and_leaves_nothing(cudart: FakeCudart) -> None:
    cudart.code = 2
    assert_expected_inline(
        refusal(HostPool, make_cuda_layout(), 10),
        """\
RuntimeError: the driver did not pin 1280 bytes of host memory for cuda:0: out of memory
(error 2); ask for fewer pages, raise the limit on locked memory (ulimit -l), or pass
pinned=False for pageable memory""",
    )
    gc.collect()
    assert cudart.log == ["register 1280 bytes, flags 1", "clear the error"]
    with pytest.raises(AssertionError, match="nothing is mapped"):
        mapped_bytes(cudart.address)


def test_a_failed_unregistration_warns(cudart: FakeCudart) -> None:
    pool = HostPool(make_cuda_layout(), num_pages=1)
    cudart.code = 2
    with pytest.warns(RuntimeWarning, match=r"did not unpin 128 bytes.*out of memory \(error 2\)"):
        pool.close()


@pytest.mark.gpu
def test_the_driver_says_that_pages_are_pinned_until_the_pool_is_closed() -> None:
    pool = HostPool(make_layout(device="cuda:0"), num_pages=1000)
    view = pool.pages
    assert pool.is_pinned
    assert view[-1].is_pinned()
    pool.close()
    assert not view.is_pinned()
    assert not HostPool(make_layout(device="cuda:0"), num_pages=1, pinned=False).is_pinned


@pytest.mark.gpu
def test_pinning_commits_what_was_asked_and_no_more() -> None:
    def resident() -> int:
        status = Path("/proc/self/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+) kB", status).group(1)) * 1024  # type: ignore[union-attr]

    layout = make_layout(row_bytes=1 << 20, device="cuda:0")
    HostPool(layout, num_pages=1).close()  # what the driver needs once
    before = resident()
    pool = HostPool(layout, num_pages=300)
    grown = resident() - before
    assert pool.nbytes <= grown + (1 << 20)
    assert grown <= pool.nbytes * 1.01 + (1 << 20)
    pool.close()


@pytest.mark.gpu
def test_a_failed_registration_leaves_no_error_for_the_next_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layout = make_layout(device="cuda:0")
    monkeypatch.setattr(host_memory, "_REGISTER_PORTABLE", 0x7FFF)  # flags no driver knows
    with pytest.raises(RuntimeError, match="did not pin"):
        HostPool(layout, num_pages=1)
    ones = torch.ones(1000, device="cuda:0").add_(1)
    torch.cuda.synchronize()
    assert ones.eq(2).all().item()
