"""Pools with encoded slots: their sizes, what they refuse, and how processes agree on them."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from bf16_cache import BLOCK_BYTES, SIZES, Bf16Cache
from error_text import error_text
from expecttest import assert_expected_inline
from logged import logged
from simulated_cache import needs_kernels
from simulated_driver import Driver, place, simulated
from slot_model import SlotModel

from torch_kvswap import HostPool, OffloadHandler, PagedLayout


def layout_of(dtype: torch.dtype, row: int = 4096) -> PagedLayout:
    return PagedLayout([torch.zeros(4, row, dtype=dtype)])


def test_slots_have_the_size_of_the_format() -> None:
    layout = Bf16Cache().layout
    pool = HostPool(layout, 5, 3, encoding="lossless")
    slot_bytes = SlotModel(SIZES).slot_bytes
    assert (pool.encoding, pool.slot_bytes) == ("lossless", slot_bytes)
    assert pool.pages.shape == (5, 3, slot_bytes)
    assert (pool.page_bytes, pool.nbytes) == (3 * slot_bytes, 15 * slot_bytes)
    assert HostPool.page_bytes_of(layout, 3, encoding="lossless") == pool.page_bytes
    assert pool._slabs.strides.tolist() == [slot_bytes] * len(SIZES)
    assert pool._slabs.bases.tolist() == [pool.pages.data_ptr()] * len(SIZES)
    assert pool._slabs.sizes.tolist() == SIZES


def test_bytes_are_encoded_if_the_layout_says_so() -> None:
    as_bytes = PagedLayout([torch.zeros(4, 4096, dtype=torch.int8)], dtype=torch.bfloat16)
    values = layout_of(torch.bfloat16, 2048)
    sizes = [HostPool.page_bytes_of(one, encoding="lossless") for one in (as_bytes, values)]
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize("encoding", ["lossy", None])
def test_an_encoding_that_there_is_not_is_refused(encoding: Any) -> None:
    layout, said = Bf16Cache().layout, f"encoding is {encoding!r}; it must be 'raw' or 'lossless'"
    for make in (
        lambda: HostPool(layout, 1, encoding=encoding),
        lambda: HostPool.page_bytes_of(layout, encoding=encoding),
    ):
        with pytest.raises(ValueError, match=f"^{re.escape(said)}$"):
            make()


def test_bytes_of_an_unknown_type_are_refused() -> None:
    assert_expected_inline(
        error_text(HostPool, layout_of(torch.uint8), 1, encoding="lossless"),
        """\
ValueError: encoding='lossless' is for torch.bfloat16, but the layout is of torch.uint8;
use encoding='raw', or pass dtype=torch.bfloat16 to PagedLayout if the tensors are views
of such values""",
    )
    mixed = PagedLayout([torch.zeros(4, 64, dtype=one) for one in (torch.bfloat16, torch.int8)])
    assert_expected_inline(
        error_text(HostPool, mixed, 1, encoding="lossless"),
        """\
ValueError: encoding='lossless' is for torch.bfloat16, but the layout is of several
types; use encoding='raw', or pass dtype=torch.bfloat16 to PagedLayout if the tensors
are views of such values""",
    )


def test_sizes_that_cannot_be_encoded_are_refused() -> None:
    tensors = [torch.zeros(4, row, dtype=torch.bfloat16) for row in (2048, 2048, 1000)]
    assert_expected_inline(
        error_text(HostPool, PagedLayout(tensors), 1, encoding="lossless"),
        """\
ValueError: slab 2 has 2000 bytes of a block; lossless encoding needs a multiple of 64
bytes in every slab; use encoding='raw'""",
    )


@needs_kernels
@simulated
def test_a_handler_refuses_slots_that_are_not_pinned(driver: Driver) -> None:
    layout = place(driver, Bf16Cache().layout)
    driver.fail("cuMemHostRegister", code=2)
    with logged() as messages:
        pool = HostPool(layout, 4, encoding="lossless")
    assert len(messages) == 1
    assert_expected_inline(
        error_text(OffloadHandler, layout, pool),
        """\
ValueError: host pages with encoding='lossless' must be pinned, because kernels read and
write them; pin the pool, or make it with encoding='raw'""",
    )


def test_a_view_is_encoded_as_its_pool_is() -> None:
    pool = HostPool(Bf16Cache().layout, 4, 2, encoding="lossless")
    view = pool.view_for(layout_of(torch.bfloat16, 2048))
    assert view.encoding == "lossless"
    assert (view.slot_bytes, view.page_bytes) == (pool.slot_bytes, pool.page_bytes)
    assert view._slabs.strides.tolist() == [pool.slot_bytes]
    assert view.view_for(Bf16Cache().layout)._slabs.sizes.tolist() == SIZES


def test_a_raw_pool_holds_larger_encoded_blocks() -> None:
    states = layout_of(torch.float32, BLOCK_BYTES // 4 - 256)
    pool = HostPool(states, 4)
    view = pool.view_for(Bf16Cache().layout, encoding="lossless")
    assert view.encoding == "lossless"
    assert view.slot_bytes == BLOCK_BYTES - 1024


def test_a_view_with_larger_slots_is_refused() -> None:
    pool = HostPool(Bf16Cache().layout, 4, encoding="lossless")
    large = layout_of(torch.bfloat16, BLOCK_BYTES)
    assert_expected_inline(
        error_text(pool.view_for, large),
        """\
ValueError: blocks of 24576 bytes, encoded in 18624 bytes, do not fit into slots of 9312
bytes; make the pool from the layout with the largest slots""",
    )
    assert_expected_inline(
        error_text(pool.view_for, Bf16Cache().layout, encoding="raw"),
        """\
ValueError: blocks of 12288 bytes do not fit into slots of 9312 bytes; make the pool
from the layout with the largest slots""",
    )
    states = layout_of(torch.float32)
    assert_expected_inline(
        error_text(pool.view_for, states),
        """\
ValueError: encoding='lossless' is for torch.bfloat16, but the layout is of
torch.float32; pass encoding='raw' for this view""",
    )


def test_a_process_with_another_cache_cannot_attach() -> None:
    handle = HostPool(Bf16Cache().layout, 4, encoding="lossless", shared=True).share()
    small = layout_of(torch.bfloat16, 1024)
    assert_expected_inline(
        error_text(HostPool.attach, small, handle),
        """\
ValueError: a block of 2048 bytes in 1 slab needs 1560 bytes encoded, and a slot has
1552; attach with a layout of the cache that the pool was made for""",
    )


@pytest.mark.parametrize("encoding", ["raw", "lossless"])
def test_a_block_is_read_out_of_its_page(encoding: str) -> None:
    cache = Bf16Cache()
    cache.fill(5, "normal")
    with HostPool(cache.layout, 4, 3, encoding=encoding) as pool:  # type: ignore[arg-type]
        handler = OffloadHandler(cache.layout, pool)
        handler.store(gpu_block_ids=[5], page_ids=[2], first_slot=1).synchronize()
        block = pool.read_block(2, 1)
        assert block.numpy().tobytes() == cache.bytes_of(5)
        block.zero_()
        assert pool.read_block(2, 1).numpy().tobytes() == cache.bytes_of(5)


def test_a_block_that_is_absent_is_not_read() -> None:
    pool = HostPool(Bf16Cache().layout, 4, 3, encoding="lossless")
    assert_expected_inline(
        error_text(pool.read_block, 1, 2),
        """\
ValueError: slot 2 of page 1 holds no encoded block: its store was rejected, or nothing
was stored there""",
    )
    assert_expected_inline(
        error_text(pool.read_block, 4), """IndexError: page is 4; there are 4 host pages, 0 to 3"""
    )
    assert_expected_inline(
        error_text(pool.read_block, 0, 3), """IndexError: slot is 3; a page has slots 0 to 2"""
    )
