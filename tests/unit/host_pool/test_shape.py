"""How many bytes a page has, and how many pages make a chunk."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torch_kvswap.host_pool.shape import PoolShape
from torch_kvswap.layout import PagedLayout

SYSTEM_PAGE = os.sysconf("SC_PAGE_SIZE")


def layout(row_bytes: int = 64) -> PagedLayout:
    return PagedLayout([torch.zeros(2, row_bytes, dtype=torch.uint8)])


@given(st.integers(1, 3 * SYSTEM_PAGE), st.integers(1, 1 << 24))
def test_chunks_are_powers_of_two_that_end_between_pages_of_the_system(
    row_bytes: int, chunk_bytes: int
) -> None:
    shape = PoolShape(layout(row_bytes), 1, 1)
    chunk = shape.chunk_of(chunk_bytes)
    assert chunk & (chunk - 1) == 0
    assert chunk * row_bytes % SYSTEM_PAGE == 0
    is_least = chunk == 1 or chunk // 2 * row_bytes % SYSTEM_PAGE != 0
    assert is_least or chunk_bytes // 2 < chunk * row_bytes <= chunk_bytes


@given(st.integers(1, 3 * SYSTEM_PAGE), st.integers(1, 20), st.integers(0, 13))
def test_aligned_pages_are_padded_as_little_as_slots_at_equal_distances_allow(
    row_bytes: int, blocks_per_page: int, power: int
) -> None:
    plain = PoolShape(layout(row_bytes), 1, blocks_per_page)
    shape = PoolShape(layout(row_bytes), 1, blocks_per_page, page_alignment=1 << power)
    assert shape.page_bytes % (1 << power) == 0
    assert 0 <= shape.page_bytes - plain.page_bytes < blocks_per_page << power
    fewer = blocks_per_page * (shape.slot_bytes - 1)
    assert fewer < plain.page_bytes or fewer % (1 << power)


@pytest.mark.parametrize("alignment", [3, 4095, 1 << 21])
def test_an_alignment_is_a_power_of_two(alignment: int) -> None:
    with pytest.raises(ValueError, match=f"page_alignment is {alignment}; it must be "):
        PoolShape(layout(), 1, 1, page_alignment=alignment)
