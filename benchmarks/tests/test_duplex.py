"""The benchmark of both directions at once: it judges its figures right, and notices wrong
bytes.
"""

from __future__ import annotations

from typing import Any

import comparison
import duplex
import pytest
import torch
from blocks import ARRANGEMENTS
from comparison import WARM, Comparison, Plan
from corrupting_handler import CorruptingHandler, leave_one_out
from transfers import BOTH, Kind, Shape

from torch_kvswap import OffloadHandler

pytestmark = pytest.mark.slow  # of a benchmark program

CPU = torch.device("cpu")
TINY = ["--shapes", "3x1", "1x2", "--blocks", "4", "--samples", "2", "--cold-samples", "1"]
TINY += ["--other-mib", "1", "--device"]


def wrong_of(corrupt: Any) -> int:
    torch.manual_seed(0)
    kind = Kind(Shape(3, 1), ARRANGEMENTS[0], BOTH, 8)
    blocks = kind.shape.new_blocks(CPU, 50)
    options = duplex._parser().parse_args([*TINY, "cpu"])
    plan = Plan([kind.shape], [BOTH], [8], [WARM], links=True)
    with OffloadHandler(blocks.layout, blocks.host) as handler:
        compared = Comparison(CPU, options, kind.nbytes, parts=1)
        corrupting = CorruptingHandler(handler, corrupt)
        return comparison.measure(compared, corrupting, blocks, kind, plan).wrong


def test_right_bytes_are_right() -> None:
    assert wrong_of(lambda first, second: (first, second)) == 0


def test_a_block_that_is_left_out_is_seen() -> None:
    assert wrong_of(leave_one_out) > 0


def test_the_store_and_the_load_share_no_block_and_no_page() -> None:
    said: list[tuple[list[int], list[int]]] = []
    wrong_of(lambda first, second: said.append((first, second)) or (first, second))
    for (blocks, pages), (pages_read, blocks_written) in zip(said[::2], said[1::2], strict=True):
        assert len({*blocks, *blocks_written}) == len({*pages, *pages_read}) == 16
