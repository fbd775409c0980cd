"""The benchmark of the calls: it judges the worst cell, and the growth with the number of
layers.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import submit_cost
from blocks import ARRANGEMENTS
from comparison import BIG, COLD, HELD, OURS, REFERENCE, WARM, Cell, Samples
from expecttest import assert_expected_inline
from submit_cost_report import Expansion, judge_calls, judge_expansions, tables
from timing import Move, Spread
from transfers import Kind, Shape

pytestmark = pytest.mark.slow  # of a benchmark program

SMALL = ["--blocks", "1", "8", "--shapes", "1x1", "3x1", "--samples", "3", "--cold-samples", "1"]
SMALL += ["--other-mib", "1", "--device"]


def a_spread(median: float) -> Spread:
    return Spread(median, median, median, 2 * median, 2 * median, 2 * median)


def a_cell(
    layers: int,
    blocks: int,
    us: float,
    direction: str = "store",
    state: str = WARM,
    arrangement: str = ARRANGEMENTS[0],
) -> Cell:
    """The calls of the reference take 20 us."""
    moves = {OURS: Move(900, us, "staged"), BIG: Move(900, 2), REFERENCE: Move(900, 20)}
    samples = Samples({way: [move] for way, move in moves.items()})
    return Cell(Kind(Shape(layers, 8), arrangement, direction, blocks), {state: samples})


EXPANSIONS = [
    Expansion(1_000_000, 4, a_spread(750), a_spread(500), a_spread(900)),
    Expansion(1_000_000, 16, a_spread(751), a_spread(500), a_spread(900)),
]


def test_the_worst_cell_and_the_most_growth_are_judged() -> None:
    cells = [
        a_cell(1, 8, 23),
        a_cell(160, 8, 27),
        a_cell(160, 8, 21, state=COLD),
        a_cell(1, 64, 20, "load", HELD),
        a_cell(160, 64, 26, "load", HELD),
        a_cell(1, 64, 10, "load", HELD, ARRANGEMENTS[1]),
        a_cell(160, 64, 10, "load", HELD, ARRANGEMENTS[1]),
        a_cell(160, 4096, 500),
    ]
    assert_expected_inline(
        "\n".join(map(str, [*judge_calls(cells), *judge_expansions(EXPANSIONS)])),
        """\
MISSED       call of 8 blocks, warm, over that of the reference, worst: 1.35, at most 1.30
MISSED       call of 8 blocks, cold, over that of the reference, worst: 1.05, at most 1
met          call of 64 blocks, held, over that of the reference, worst: 1.30, at most 1.50
met          call of 8 blocks, with most layers over with fewest, worst: 1.17, at most 1.25
MISSED       call of 64 blocks, with most layers over with fewest, worst: 1.30, at most 1.25
met          expand_block_ids by 4 over memcpy: 1.50, at most 1.50
MISSED       expand_block_ids by 16 over memcpy: 1.502, at most 1.5""",
    )


def test_the_table_has_the_call_beside_those_of_the_copies() -> None:
    (_, found) = tables([a_cell(160, 8, 27)]).split("\n\n")
    assert found.splitlines()[1].split() == [
        *("160", "x", "8", "KiB", "8", "warm"),
        *("27.00", "27.00", "27.00", "2", "20", "1.35", "-"),
    ]


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
    assert submit_cost.main([*SMALL, device, "--json", str(file)]) == 0
    figures = json.loads(file.read_text())
    assert figures["settings"]["samples"] == 3
    states = {WARM: 3, HELD: 3, COLD: 1} if device == "cuda" else {WARM: 3, COLD: 1}
    kinds = [
        (one["arrangement"], one["shape"]["layers"], one["direction"], one["blocks"])
        for one in figures["cells"]
    ]
    assert kinds == [
        (arrangement, layers, direction, blocks)
        for arrangement in ARRANGEMENTS
        for layers in (1, 3)
        for direction in ("store", "load")
        for blocks in (1, 8)
    ]
    for one in figures["cells"]:
        assert {state: found["count"] for state, found in one["states"].items()} == states
        assert one["wrong"] == 0
    assert [one["factor"] for one in figures["expansions"]] == [4, 16, 64]
    # of two numbers of blocks in three states, their growths, and the expansions
    assert len(figures["verdicts"]) == (6 + 2 + 3 if device == "cuda" else 3)
    assert "blocks and pages with wrong bytes: 0" in capsys.readouterr().out


def test_wrong_bytes_end_the_program_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submit_cost, "OUTPUTS", 1000)
    cell = a_cell(1, 8, 1000)  # a missed target does not
    monkeypatch.setattr(submit_cost, "measure_all", lambda *_: [cell])
    for cell.wrong in (0, 1):
        assert submit_cost.main([*SMALL, "cpu"]) == cell.wrong
