"""The benchmark of the calls: it judges the slowest cell, and the growth with the number of
slabs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import submit_cost
import torch
from blocks import NumberedBlocks
from corrupting_handler import CorruptingHandler, leave_one_out
from expecttest import assert_expected_inline
from submit_cost_report import Cell, Expansion, judge
from timing import Spread

from torch_kvswap import OffloadHandler

pytestmark = pytest.mark.slow  # of a benchmark program

CPU = torch.device("cpu")
SMALL = ["--blocks", "1", "8", "--slabs", "1", "3", "--fragment-bytes", "64", "--samples", "3"]


def a_spread(median: float) -> Spread:
    return Spread(median, median, median, 2 * median, 2 * median, 2 * median)


def a_cell(slabs: int, blocks: int, us: float, direction: str = "store", wrong: int = 0) -> Cell:
    return Cell(slabs, direction, blocks, "held", a_spread(us), ["staged"], wrong)


EXPANSIONS = [
    Expansion(1_000_000, 4, a_spread(750), a_spread(500), a_spread(900)),
    Expansion(1_000_000, 16, a_spread(751), a_spread(500), a_spread(900)),
]


def test_the_slowest_cell_and_the_most_growth_are_judged() -> None:
    cells = [
        a_cell(1, 8, 30),
        a_cell(160, 8, 36),
        a_cell(1, 64, 40, "load"),
        a_cell(16, 64, 50, "load"),
        a_cell(160, 64, 51, "load"),
        a_cell(160, 4096, 500),
    ]
    assert_expected_inline(
        "\n".join(map(str, judge(cells, EXPANSIONS))),
        """\
MISSED       submit of 8 blocks, slowest median in us: 36, at most 35
met          submit of 64 blocks, slowest median in us: 51, at most 60
met          submit of 8 blocks, with most slabs over with fewest: 1.20, at most 1.25
MISSED       submit of 64 blocks, with most slabs over with fewest: 1.27, at most 1.25
met          expand_block_ids by 4 over memcpy: 1.50, at most 1.50
MISSED       expand_block_ids by 16 over memcpy: 1.50, at most 1.50""",
    )


def measured(corrupt: Any) -> Cell:
    torch.manual_seed(0)
    blocks = NumberedBlocks(CPU, 34, layers=3, fragment_bytes=64)
    with OffloadHandler(blocks.layout, blocks.host) as handler:
        return submit_cost.measure(
            CorruptingHandler(handler, corrupt), blocks, "store", 8, "free", 2
        )


def test_a_cell_says_what_was_called_and_that_its_bytes_are_right() -> None:
    cell = measured(lambda first, second: (first, second))
    assert (cell.slabs, cell.direction, cell.blocks, cell.state) == (3, "store", 8, "free")
    assert cell.paths == ["host"]
    assert 0 < cell.submit.median <= cell.submit.p99
    assert cell.wrong == 0


def test_a_block_that_is_left_out_is_seen() -> None:
    assert measured(leave_one_out).wrong > 0


def test_wrong_ids_of_an_expansion_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submit_cost, "expand_block_ids", lambda *_, out=None, **__: out)
    with pytest.raises(RuntimeError, match="expand_block_ids gave other ids than it should"):
        submit_cost.expand(100, 7, 2)


def test_an_expansion_need_not_end_with_a_large_block() -> None:
    assert submit_cost.expand(100, 7, 2).outputs == 100


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_every_cell_is_in_the_file(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(submit_cost, "OUTPUTS", 1000)
    file = tmp_path / "figures.json"
    assert submit_cost.main([*SMALL, "--device", device, "--json", str(file)]) == 0
    figures = json.loads(file.read_text())
    assert figures["settings"] == {"samples": 3, "fragment_bytes": 64}
    states = ["held", "free"] if device == "cuda" else ["free"]
    kinds = [
        (one["slabs"], one["blocks"], one["direction"], one["state"]) for one in figures["cells"]
    ]
    assert kinds == [
        (slabs, blocks, direction, state)
        for slabs in (1, 3)
        for blocks in (1, 8)
        for direction in ("store", "load")
        for state in states
    ]
    assert [one["factor"] for one in figures["expansions"]] == [4, 16, 64]
    assert len(figures["verdicts"]) == (7 if device == "cuda" else 3)
    assert "blocks and pages with wrong bytes: 0" in capsys.readouterr().out


def test_wrong_bytes_end_the_program_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submit_cost, "OUTPUTS", 1000)
    for wrong in (0, 1):
        cells = [a_cell(1, 8, 1000, wrong=wrong)]  # a missed target does not
        monkeypatch.setattr(submit_cost, "measure_all", lambda *_, cells=cells: cells)
        assert submit_cost.main(["--device", "cpu", *SMALL]) == wrong
