"""The benchmark of scattered blocks: it judges its figures right, and notices wrong bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import bandwidth
import pytest
import torch
from bandwidth_report import PEER, SUBMIT, TOTAL, Cell
from big_copy import BigCopy
from blocks import NumberedBlocks
from corrupting_handler import CorruptingHandler, leave_one_out
from transfers import Kind, Shape

from torch_kvswap import OffloadHandler

pytestmark = pytest.mark.slow  # of a benchmark program

CPU = torch.device("cpu")
TINY = ["--device", "cpu", "--shapes", "3x1", "1x2", "--blocks", "8", "1", "--samples", "2"]


def a_cell(kib: int, direction: str, blocks: int, total: float, big: float, submit: float) -> Cell:
    kind = Kind(Shape(2, kib), direction, blocks)
    return Cell(kind, [total, 2 * total], [big, 2 * big], [submit] * 2, [], ["strided"])


# Targets


@pytest.mark.parametrize(
    ("kib", "blocks", "target"),
    [(8, 8, 1.15), (4, 8, 1.22), (8, 64, 1.05), (4, 64, 1.08), (32, 512, 1.02), (2, 512, 1.05)],
)
def test_smaller_fragments_may_take_longer(kib: int, blocks: int, target: float) -> None:
    cell = a_cell(kib, "store", blocks, 100 * target - 0.01, 100, 1)
    assert cell.ratio_target == target
    assert cell.verdicts[TOTAL].met
    assert not a_cell(kib, "store", blocks, 100 * target + 0.01, 100, 1).verdicts[TOTAL].met


def test_one_block_may_take_12_us_more_than_the_big_copy() -> None:
    kind = Kind(Shape(2, 8), "load", 1)
    met = Cell(kind, [31.9] * 3, [20.0] * 3, [1.0] * 3)
    missed = Cell(kind, [32.1] * 3, [20.0] * 3, [1.0] * 3)
    assert (met.verdicts[TOTAL].met, missed.verdicts[TOTAL].met) == (True, False)


@pytest.mark.parametrize(("blocks", "us"), [(1, 20), (8, 35), (64, 60), (512, 100)])
def test_the_call_may_take_longer_for_more_blocks(blocks: int, us: float) -> None:
    assert a_cell(8, "load", blocks, 1, 1, us).verdicts[SUBMIT].met
    assert not a_cell(8, "load", blocks, 1, 1, us + 0.1).verdicts[SUBMIT].met


def test_figures_are_medians_of_pairs() -> None:
    kind = Kind(Shape(2, 8), "store", 8)
    cell = Cell(kind, [10, 90, 30], [10, 30, 20], [5, 1, 9], [(11, 10), (24, 20)])
    assert (cell.ratio, cell.link_ratio, cell.submit) == (1.5, pytest.approx(1.15), 5)


def test_a_shape_that_peers_were_measured_with_is_to_be_no_slower_than_the_best_of_them() -> None:
    kind = Kind(Shape(160, 4), "load", 8)  # may take 1.22 times the big copy
    cells = [Cell(kind, [total], [100.0], [1.0]) for total in (121.0, 180.0, 181.0)]
    assert [cell.verdicts[PEER].met for cell in cells] == [True, True, False]


# Bytes


def wrong_of(direction: str, corrupt: Any) -> int:
    torch.manual_seed(0)  # a page may get a block that it has, and nothing is wrong without it
    blocks = NumberedBlocks(CPU, 34, layers=3, fragment_bytes=1024)
    with OffloadHandler(blocks.layout, blocks.host) as handler:
        kind = Kind(Shape(3, 1), direction, 8)
        big = BigCopy(CPU, 8 * 3 * 1024)
        return bandwidth.measure(
            CorruptingHandler(handler, corrupt), blocks, big, kind, 2, False
        ).wrong


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
    assert len(seen) == bandwidth.WARM_UPS + 2
    assert all(len(set(ids)) == 8 for pair in seen for ids in pair)
    assert len({str(pair) for pair in seen}) == len(seen)
    assert all(blocks != pages for blocks, pages in seen)


# The program


def test_every_cell_is_in_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "results" / "figures.json"
    assert bandwidth.main([*TINY, "--json", str(file)]) == 0
    figures = json.loads(file.read_text())
    assert figures["settings"] == {
        "samples": 2,
        "warm_ups": 3,
        "poll": False,
        "path": None,
        "staging_mib": 32,
    }
    assert figures["machine"]["torch"] == torch.__version__
    assert figures["verdicts"] == []
    cells = figures["cells"]
    kinds = [(cell["shape"]["layers"], cell["direction"], cell["blocks"]) for cell in cells]
    assert kinds == [(n, to, count) for n in (3, 1) for to in ("store", "load") for count in (1, 8)]
    for cell in cells:
        assert (cell["wrong"], cell["paths"]) == (0, ["host"])
        for times in (cell["total_us"], cell["big_us"], cell["submit_us"]):
            assert len(times) == 2
            assert min(times) > 0
    said = capsys.readouterr()
    assert "3 x 1 KiB" in said.out
    assert "blocks and pages with wrong bytes: 0" in said.out
    assert "cells 100 %" in said.err


@pytest.mark.parametrize(("wrong", "code"), [(0, 0), (1, 1)])
def test_wrong_bytes_end_the_program_with_1(
    wrong: int, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = Kind(Shape(1, 8), "store", 8)
    cell = Cell(kind, [100.0], [1.0], [1000.0], wrong=wrong)  # a missed target does not
    monkeypatch.setattr(bandwidth, "measure_all", lambda *_: [cell])
    assert bandwidth.main(TINY) == code


@pytest.mark.gpu
def test_the_program_judges_a_gpu(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    assert bandwidth.main([*TINY, "--device", "cuda", "--json", str(file)]) == 0
    figures = json.loads(file.read_text())
    assert [cell["wrong"] for cell in figures["cells"]] == [0] * 8
    assert len(figures["verdicts"]) == 16
