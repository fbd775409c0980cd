"""The benchmark of encodings: what it judges, and that it notices wrong bytes."""

from __future__ import annotations

from typing import Any

import encoding
import pytest
import torch
from blocks import ONE_BY_ONE
from comparison import Comparison
from corrupting_handler import CorruptingHandler, leave_one_out
from encoding_report import LOSSLESS, RAW
from model_blocks import ModelBlocks
from transfers import Kind, Shape

pytestmark = pytest.mark.slow  # of a benchmark program

CPU = torch.device("cpu")
TINY = ["--shapes", "3x4", "1x8", "--blocks", "1", "8", "--samples", "2"]
TINY += ["--other-mib", "1", "--repeats", "1", "--bits", "12.5", "--device"]


@pytest.mark.parametrize("width", [RAW, LOSSLESS])
def test_blocks_and_pages_that_are_wrong_are_counted(width: str) -> None:
    blocks = ModelBlocks(CPU, 8, layers=3, fragment_bytes=4096, encoding=width)
    assert blocks.wrong() == 0
    blocks.refill()
    blocks._in_pages[[0, 1]] = blocks._in_pages[[1, 0]]
    blocks._tensors[1][5] += 1
    assert blocks.wrong() == 3


@pytest.mark.parametrize(("corrupt", "right"), [(lambda *ids: ids, True), (leave_one_out, False)])
def test_bytes_that_one_encoding_gets_wrong_are_seen(corrupt: Any, right: bool) -> None:
    torch.manual_seed(0)
    kind = Kind(Shape(3, 4), ONE_BY_ONE, "load", 8)
    options = encoding._parser().parse_args([*TINY, "cpu"])
    with encoding.ExitStack() as stack:
        pair = encoding.Pair.open(CPU, kind.shape, 34, options, stack)
        wrong = CorruptingHandler(pair.handlers[LOSSLESS], corrupt)
        pair = encoding.Pair(pair.blocks, {**pair.handlers, LOSSLESS: wrong})
        cell = encoding.measure(Comparison(CPU, options, kind.nbytes, 1), pair, kind)
    assert (cell.wrong == 0) == right
