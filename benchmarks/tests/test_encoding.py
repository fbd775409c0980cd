"""The benchmark of encodings: what it judges, and that it notices wrong bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import encoding
import pytest
import torch
from blocks import ONE_BY_ONE
from comparison import BIG, REFERENCE, WARM, Comparison, Samples
from corrupting_handler import CorruptingHandler, leave_one_out
from encoding_report import LOSSLESS, RAW, Cell, judge
from expecttest import assert_expected_inline
from interference_report import Cell as BesideCell
from interference_report import Sample
from model_blocks import ModelBlocks
from timing import Move
from transfers import BOTH, Kind, Shape

pytestmark = pytest.mark.slow  # of a benchmark program

CPU = torch.device("cpu")
TINY = ["--shapes", "3x4", "1x8", "--blocks", "1", "8", "--samples", "2"]
TINY += ["--other-mib", "1", "--repeats", "1", "--bits", "12.5", "--device"]


def a_cell(shape: Shape, direction: str, blocks: int, raw: float, lossless: float) -> Cell:
    moves = {RAW: [Move(raw, 1.0, "staged")], LOSSLESS: [Move(lossless, 1.0, "staged")]}
    samples = Samples({**moves, BIG: [Move(1, 1)], REFERENCE: [Move(1, 1)]})
    return Cell(Kind(shape, ONE_BY_ONE, direction, blocks), {WARM: samples})


def beside(way: str, lost: float) -> BesideCell:
    sample = Sample(10.0, 10.0 + lost, 1.0, 50.0)
    return BesideCell(Shape(160, 8), ONE_BY_ONE, "load", "decode", way, [sample], [], 0.0)


def test_each_cell_has_the_target_of_its_size() -> None:
    cells = [
        a_cell(Shape(160, 8), "store", 1, raw=30, lossless=44),
        a_cell(Shape(160, 8), "store", 8, raw=30, lossless=46),
        a_cell(Shape(160, 2), "load", 64, raw=110, lossless=100),
        a_cell(Shape(64, 2), "load", 64, raw=99, lossless=100),
        a_cell(Shape(160, 8), "load", 512, raw=122, lossless=100),
        a_cell(Shape(1, 2048), "load", 512, raw=118, lossless=100),
        a_cell(Shape(160, 8), BOTH, 512, raw=114, lossless=100),
    ]
    verdicts = judge(cells, [beside(RAW, 2.0), beside(LOSSLESS, 2.0)])
    assert_expected_inline(
        "\n".join(map(str, verdicts)).replace(f", {ONE_BY_ONE}", ""),
        """\
met          store of 1 x (160 x 8 KiB), us more than raw: 14, at most 15
MISSED       store of 8 x (160 x 8 KiB), us more than raw: 16, at most 15
met          load of 64 x (160 x 2 KiB), KV bytes per second over raw: 1.10, at least 1.10
MISSED       load of 64 x (64 x 2 KiB), KV bytes per second over raw: 0.99, at least 1
met          load of 512 x (160 x 8 KiB), KV bytes per second over raw: 1.22, at least 1.22
met          load of 512 x (1 x 2048 KiB), KV bytes per second over raw: 1.18, at least 1.18
MISSED       both of 512 x (160 x 8 KiB), KV bytes per second over raw: 1.14, at least 1.15
met          load beside decode, lost ms/GB of KV: 2, at most 2""",
    )


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


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_every_cell_is_in_the_file(device: str, tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    assert encoding.main([*TINY, device, "--json", str(file)]) == 0
    figures = json.loads(file.read_text())
    assert (figures["benchmark"], figures["settings"]["bits"]) == ("encoding", 12.5)
    kinds = [(one["shape"]["layers"], one["direction"], one["blocks"]) for one in figures["cells"]]
    assert kinds == [
        (layers, direction, blocks)
        for layers in (3, 1)
        for direction in ("store", "load", BOTH)
        for blocks in (1, 8)
    ]
    ways = [(cell["direction"], cell["way"]) for cell in figures["beside compute"]]
    assert ways == [("store", RAW), ("store", LOSSLESS), ("load", RAW), ("load", LOSSLESS)]
    assert len(figures["verdicts"]) == (len(kinds) + 2 if device == "cuda" else 0)
