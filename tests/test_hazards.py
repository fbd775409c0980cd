import numpy as np
import pytest

from torch_kvswap.hazards import Hazards
from torch_kvswap.transfer import Direction


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


@pytest.fixture
def hazards() -> Hazards:
    """Store 3 of block 1 into page 2, then load 7 of page 0 into block 4."""
    hazards = Hazards(num_blocks=6, num_pages=4)
    hazards.note("store", 3, ids(1), ids(2))
    hazards.note("load", 7, ids(4), ids(0))
    return hazards


@pytest.mark.parametrize(
    ("direction", "blocks", "pages", "expected"),
    [
        ("load", ids(5), ids(2), 3),  # the page is being written
        ("load", ids(1), ids(3), 3),  # the block is being read
        ("load", ids(4), ids(0), -1),  # loads are in order among themselves
        ("load", ids(0, 5), ids(1, 3), -1),
        ("store", ids(5), ids(0), 7),  # the page is being read
        ("store", ids(4), ids(3), 7),  # the block is being written
        ("store", ids(1), ids(2), -1),
        ("store", ids(), ids(), -1),
    ],
)
def test_a_transfer_waits_for_the_other_direction_where_they_share_a_block_or_a_page(
    hazards: Hazards, direction: Direction, blocks: np.ndarray, pages: np.ndarray, expected: int
) -> None:
    assert hazards.latest_before(direction, blocks, pages) == expected


def test_a_block_and_a_page_of_the_same_number_are_two_things(hazards: Hazards) -> None:
    assert hazards.latest_before("load", ids(2), ids(1)) == -1
    assert hazards.latest_before("store", ids(0), ids(4 - 1)) == -1


def test_the_latest_of_several_is_enough(hazards: Hazards) -> None:
    hazards.note("store", 9, ids(0, 1), ids(2, 3))
    assert hazards.latest_before("load", ids(1, 5), ids(0, 2)) == 9
    assert hazards.latest_before("load", ids(0), ids(1)) == 9
