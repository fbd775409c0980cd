"""How many pages make a chunk."""

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


def test_what_is_no_layout_has_no_shape() -> None:
    with pytest.raises(TypeError, match="a host pool is made from a PagedLayout, not a str"):
        PoolShape("layout", 1, 1)  # type: ignore[arg-type]


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
