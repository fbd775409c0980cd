"""Layouts that share memory must share whole blocks."""

from __future__ import annotations

import pytest
import torch
from error_text import error_text
from expecttest import assert_expected_inline

from torch_kvswap.layout import PagedLayout, block_spaces


def same(*layouts: PagedLayout) -> list[int]:
    """Equal numbers for layouts that share their blocks, in the order of their first use."""
    spaces = block_spaces(layouts)
    return [spaces.index(space) for space in spaces]


def test_layouts_of_different_memory_share_nothing() -> None:
    whole = torch.zeros(8, 6)
    layouts = [PagedLayout([part]) for part in (whole[:4], whole[4:], torch.zeros(4, 6))]
    assert same(*layouts) == same(*layouts[::-1]) == [0, 1, 2]
    assert same() == []


def test_layouts_of_the_same_tensors_share_their_blocks() -> None:
    one, other = torch.zeros(4, 6), torch.zeros(4, 6)
    assert same(PagedLayout([one]), PagedLayout([other]), PagedLayout([one])) == [0, 1, 0]
    assert same(PagedLayout([one, other]), PagedLayout([other])) == [0, 0]


def test_sharing_with_a_third_is_sharing() -> None:
    one, other = torch.zeros(4, 6), torch.zeros(4, 6)
    layouts = [PagedLayout([one]), PagedLayout([other]), PagedLayout([one, other])]
    assert same(*layouts) == [0, 0, 0]
    assert same(layouts[2], layouts[0], layouts[1]) == [0, 0, 0]


def test_fewer_of_the_same_blocks_are_shared() -> None:
    whole = torch.zeros(8, 6)
    assert same(PagedLayout([whole]), PagedLayout([whole[:5]])) == [0, 0]


@pytest.mark.parametrize(
    ("one", "other"),
    [(slice(0, 4), slice(2, 6)), (slice(0, 6), slice(5, 9)), (slice(3, 4), slice(0, 9))],
)
def test_overlapping_parts_are_the_same_block(one: slice, other: slice) -> None:
    rows = torch.zeros(4, 12)
    layouts = [PagedLayout([rows[:, one]]), PagedLayout([rows[:, other]])]
    assert same(*layouts) == same(*layouts[::-1]) == [0, 0]


@pytest.mark.parametrize("columns", [(0, 4, 4, 12), (0, 4, 8, 12), (0, 1, 11, 12)])
def test_alternating_slabs_share_no_byte(columns: tuple[int, ...]) -> None:
    rows = torch.zeros(4, 12)
    a, b, c, d = columns
    layouts = [PagedLayout([rows[:, a:b]]), PagedLayout([rows[:, c:d]])]
    assert same(*layouts) == same(*layouts[::-1]) == [0, 1]


def test_shifted_alternating_slabs_share_no_byte() -> None:
    rows = torch.zeros(5, 12)
    layouts = [PagedLayout([rows[:4, :4]]), PagedLayout([rows[1:, 8:]])]
    assert same(*layouts) == same(*layouts[::-1]) == [0, 1]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((slice(0, 4), slice(0, 12)), (slice(1, 5), slice(0, 12))),  # another row
        ((slice(0, 5), slice(0, 4)), (slice(2, 5), slice(3, 9))),
        ((slice(0, 5, 2), slice(0, 12)), (slice(0, 5), slice(0, 12))),  # another distance
        ((slice(0, 5, 2), slice(0, 4)), (slice(0, 5), slice(8, 12))),  # not one byte, but no matter
    ],
)
def test_blocks_of_another_number_may_not_be_shared(one: tuple, other: tuple) -> None:
    rows = torch.zeros(5, 12)
    layouts = [PagedLayout([rows[one]]), PagedLayout([rows[other]])]
    for pair in (layouts, layouts[::-1]):
        assert_expected_inline(
            error_text(block_spaces, pair),
            """\
ValueError: layouts 0 and 1 share memory, but the same id is not the same block in both;
make them from the same blocks with the same stride""",
        )


def test_blocks_reaching_into_other_rows_are_refused() -> None:
    memory = torch.zeros(60)
    layouts = [
        PagedLayout([torch.as_strided(memory, (4, 6), (12, 1), offset)]) for offset in (0, 8)
    ]
    with pytest.raises(ValueError, match="layouts 0 and 1 share memory"):
        block_spaces(layouts)
