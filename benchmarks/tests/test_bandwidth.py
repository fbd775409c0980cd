"""The benchmark of scattered blocks: it judges its figures right, and notices wrong bytes."""

from __future__ import annotations

from typing import Any

import bandwidth
import comparison
import pytest
import torch
from blocks import ARRANGEMENTS, NumberedBlocks
from comparison import WARM, Comparison, Plan
from corrupting_handler import CorruptingHandler, leave_one_out
from transfers import Kind, Shape

from torch_kvswap import OffloadHandler

pytestmark = pytest.mark.slow  # of a benchmark program

CPU = torch.device("cpu")
TINY = ["--shapes", "3x1", "1x2", "--blocks", "8", "1", "--samples", "2", "--cold-samples", "1"]
TINY += ["--other-mib", "1", "--device"]


# Targets


# Bytes


def wrong_of(direction: str, corrupt: Any) -> int:
    torch.manual_seed(0)  # a page may get a block that it has, and nothing is wrong without it
    blocks = NumberedBlocks(CPU, 34, layers=3, fragment_bytes=1024)
    kind = Kind(Shape(3, 1), ARRANGEMENTS[0], direction, 8)
    options = bandwidth._parser().parse_args([*TINY, "cpu"])
    compared = Comparison(CPU, options, kind.nbytes, parts=1)
    plan = Plan([kind.shape], [direction], [8], [WARM], links=True)
    with OffloadHandler(blocks.layout, blocks.host) as handler:
        corrupting = CorruptingHandler(handler, corrupt)
        return comparison.measure(compared, corrupting, blocks, kind, plan).wrong


@pytest.mark.parametrize("direction", ["store", "load"])
def test_right_bytes_are_right(direction: str) -> None:
    assert wrong_of(direction, lambda first, second: (first, second)) == 0


@pytest.mark.parametrize("direction", ["store", "load"])
def test_a_block_that_is_left_out_is_seen(direction: str) -> None:
    assert wrong_of(direction, leave_one_out) > 0


@pytest.mark.parametrize("direction", ["store", "load"])
@pytest.mark.parametrize("untouched", [0, 33])
def test_a_block_that_nobody_asked_for_is_seen(direction: str, untouched: int) -> None:
    def corrupt(first: list[int], second: list[int]) -> tuple[list[int], list[int]]:
        assert untouched not in first + second
        return [*first, first[0]], [*second, untouched]

    assert wrong_of(direction, corrupt) == 1


def test_ids_are_scattered_distinct_and_other_ones_each_time() -> None:
    seen = []
    wrong_of("store", lambda blocks, pages: seen.append((blocks, pages)) or (blocks, pages))
    assert len(seen) == 3 + 2  # rounds that warm up, and samples
    assert all(len(set(ids)) == 8 for pair in seen for ids in pair)
    assert len({str(pair) for pair in seen}) == len(seen)
    assert all(blocks != pages for blocks, pages in seen)


# The program
