"""How many bytes a page has, and how many pages make a chunk."""

from __future__ import annotations

import os

import torch
from hypothesis import given
from hypothesis import strategies as st

from torch_kvswap.host_pool.shape import PoolShape
from torch_kvswap.layout import PagedLayout

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


@given(st.integers(1, 3 * SYSTEM_PAGE // 16).map(lambda rows: 16 * rows), st.integers(1, 20))
def test_pages_of_ranks_are_padded_no_further(row_bytes: int, blocks_per_page: int) -> None:
    plain = PoolShape(layout(row_bytes), 1, blocks_per_page)
    shape = PoolShape(layout(row_bytes), 1, blocks_per_page, part=(0, 1))
    assert shape.page_bytes % SYSTEM_PAGE == 0
    assert 0 <= shape.page_bytes - plain.page_bytes < blocks_per_page * SYSTEM_PAGE
    fewer = blocks_per_page * (shape.slot_bytes - 1)
    assert fewer < plain.page_bytes or fewer % SYSTEM_PAGE
