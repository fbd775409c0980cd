"""Which pages a process uses, and how many pages make a chunk."""

from __future__ import annotations

import os

import pytest
import torch
from error_text import error_text
from expecttest import assert_expected_inline
from hypothesis import given
from hypothesis import strategies as st

from torch_kvswap.host_pool.shape import PoolShape
from torch_kvswap.layout import PagedLayout

SYSTEM_PAGE = os.sysconf("SC_PAGE_SIZE")


def layout(row_bytes: int = 64) -> PagedLayout:
    return PagedLayout([torch.zeros(2, row_bytes, dtype=torch.uint8)])


@given(st.integers(1, 1000), st.integers(1, 20))
def test_the_parts_of_the_ranks_are_all_pages_once(count: int, world: int) -> None:
    if count < world:
        return
    parts = [PoolShape(layout(), count, 1, rank, world).local_pages for rank in range(world)]
    assert [page for part in parts for page in part] == list(range(count))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_replicated_pages_are_those_of_every_rank() -> None:
    shape = PoolShape(layout(), 3, 2, rank=7, world=8, replicated=True)
    assert shape.local_pages == range(3)
    assert shape.local_bytes == range(3 * 2 * 64)


def test_ranks_and_parts_that_cannot_be_are_refused() -> None:
    assert_expected_inline(
        error_text(PoolShape, layout(), 9, 1, 4, 4),
        """ValueError: rank is 4; it must be 0 to 3""",
    )
    assert_expected_inline(
        error_text(PoolShape, layout(), 3, 1, 0, 4),
        """ValueError: num_pages=3 for world=4: each process needs at least one page""",
    )
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
