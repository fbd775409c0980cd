"""The benchmark of copy methods: it finds the best forced one, and notices wrong bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import copy_methods
import pytest
import torch
from copy_methods_report import Cell, judge
from corrupting_handler import CorruptingHandler, leave_one_out
from expecttest import assert_expected_inline
from transfers import Kind, Move, Shape

from torch_kvswap import OffloadHandler

pytestmark = pytest.mark.slow  # of a benchmark program

CPU = torch.device("cpu")
TINY = ["--device", "cpu", "--shapes", "3x1", "1x2", "--blocks", "1", "8", "--samples", "2"]


def a_cell(auto: list[float], direction: str = "store", **forced: list[float]) -> Cell:
    cell = Cell(Kind(Shape(2, 8), direction, 64), {"auto": auto, **forced})
    cell.used["auto"] = ["staged"]
    return cell


def test_the_best_forced_path_is_that_over_which_the_automatic_one_takes_longest() -> None:
    cell = a_cell([10, 30, 20], strided=[5, 30, 40], staged=[8, 24, 40], batch=[100])
    assert cell.ratios == {"strided": 1.0, "staged": 1.25, "batch": 0.1}
    assert (cell.best, cell.ratio) == ("staged", 1.25)


def test_a_path_that_takes_twice_as_long_is_no_candidate() -> None:
    cell = a_cell([50, 60], strided=[10, 30], staged=[30, 20], batch=[21, 22])
    assert cell.worth_while() == ["auto", "strided", "staged"]


CELLS = [
    a_cell([105.0], staged=[100.0], strided=[200.0]),
    a_cell([106.0], staged=[100.0], strided=[200.0]),
    a_cell([106.0], "load"),
]
CELLS[2].refused["strided"] = "the layers lie at several distances"


def test_the_automatic_path_may_take_a_twentieth_longer() -> None:
    assert_expected_inline(
        "\n".join(map(str, judge(CELLS))),
        """\
met          store of 64 x (2 x 8 KiB), automatic path over the best forced one: 1.05, at most 1.05
MISSED       store of 64 x (2 x 8 KiB), automatic path over the best forced one: 1.06, at most 1.05
not measured load of 64 x (2 x 8 KiB), automatic path over the best forced one: -, at most 1.05""",
    )


class Recorded:
    """Stands for move(): tells which handler moved."""

    def __init__(self, seconds: dict[str, float]) -> None:
        self.seconds = seconds
        self.order: list[str] = []

    def __call__(self, handler: str, blocks: Any, directions: Any, count: int) -> Move:
        self.order.append(handler)
        return Move(self.seconds[handler], 1.0, "strided")


def test_paths_take_turns_and_a_slow_one_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = Recorded({"auto": 10, "strided": 10, "batch": 30})
    monkeypatch.setattr(copy_methods, "move", recorded)
    blocks = Shape(2, 8).new_blocks(CPU, 34)
    ways = {name: name for name in recorded.seconds}
    cell = copy_methods.measure(ways, {}, blocks, Kind(Shape(2, 8), "store", 8), 4)
    assert {name: len(times) for name, times in cell.total_us.items()} == {
        "auto": 4,
        "strided": 4,
        "batch": 2,
    }
    turns = [recorded.order[at : at + 3] for at in range(0, 15, 3)]
    assert turns[2:] == [
        ["batch", "auto", "strided"],
        ["auto", "strided", "batch"],
        ["strided", "batch", "auto"],
    ]
    assert recorded.order[15:] == ["auto", "strided", "strided", "auto"]
    assert cell.used == {name: ["strided"] for name in ways}


@pytest.mark.parametrize(("corrupt", "right"), [(lambda *ids: ids, True), (leave_one_out, False)])
def test_bytes_that_one_path_gets_wrong_are_seen(corrupt: Any, right: bool) -> None:
    torch.manual_seed(0)
    shape = Shape(3, 1)
    blocks = shape.new_blocks(CPU, 34)
    with OffloadHandler(blocks.layout, blocks.host) as handler:
        ways = {"auto": handler, "staged": CorruptingHandler(handler, corrupt)}
        cell = copy_methods.measure(ways, {}, blocks, Kind(shape, "load", 8), 2)
    assert (cell.wrong == 0) == right


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_every_cell_is_in_the_file(
    device: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "figures.json"
    assert copy_methods.main([*TINY, "--device", device, "--json", str(file)]) == 0
    figures = json.loads(file.read_text())
    assert (figures["benchmark"], figures["settings"]["samples"]) == ("copy_methods", 2)
    kinds = [(one["shape"]["layers"], one["direction"], one["blocks"]) for one in figures["cells"]]
    assert kinds == [(n, to, count) for n in (3, 1) for to in ("store", "load") for count in (1, 8)]
    assert len(figures["verdicts"]) == (8 if device == "cuda" else 0)
    for cell in figures["cells"]:
        assert cell["wrong"] == 0
        if device == "cpu":
            assert (cell["used"], cell["ratio"]) == ({"auto": ["host"]}, None)
        else:
            assert cell["ratio"] > 0
            assert cell["used"]["strided"] == ["strided"]
    assert "copy methods 100 %" in capsys.readouterr().err


def test_wrong_bytes_end_the_program_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = a_cell([200.0], staged=[100.0])  # a missed target does not
    monkeypatch.setattr(copy_methods, "measure_all", lambda *_: [cell])
    assert copy_methods.main(TINY) == 0
    cell.wrong = 1
    assert copy_methods.main(TINY) == 1
