"""The benchmark of scattered blocks: it judges its figures right, and notices wrong bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import bandwidth
import comparison
import pytest
import torch
from bandwidth_report import targets
from blocks import ARRANGEMENTS, NumberedBlocks
from comparison import BIG, COLD, OURS, REFERENCE, WARM, Cell, Comparison, Plan, Samples
from comparison_report import (
    CALL_OVER_REFERENCE,
    OVER_BIG,
    OVER_REFERENCE,
    PEER,
    counts,
    no_targets,
    tables,
)
from corrupting_handler import CorruptingHandler, leave_one_out
from timing import Move
from transfers import Kind, Shape

from torch_kvswap import OffloadHandler

pytestmark = pytest.mark.slow  # of a benchmark program

CPU = torch.device("cpu")
TINY = ["--shapes", "3x1", "1x2", "--blocks", "8", "1", "--samples", "2", "--cold-samples", "1"]
TINY += ["--other-mib", "1", "--device"]


def a_cell(
    total: float,
    submit: float = 1.0,
    kib: int = 8,
    blocks: int = 64,
    state: str = WARM,
    layers: int = 2,
    direction: str = "store",
) -> Cell:
    """The big copy takes 100 us, the reference 50, and 10 in its calls."""
    moves = {OURS: Move(total, submit, "staged"), BIG: Move(100, 1), REFERENCE: Move(50, 10)}
    samples = Samples({way: [move] for way, move in moves.items()})
    return Cell(Kind(Shape(layers, kib), ARRANGEMENTS[0], direction, blocks), {state: samples})


# Targets


@pytest.mark.parametrize(
    ("blocks", "kib", "warm", "cold"),
    [
        (8, 8, 1.15, 1.25),
        (8, 4, 1.30, 1.50),
        (8, 2, 1.45, 1.80),
        (64, 32, 1.05, 1.08),
        (64, 7, 1.10, 1.17),
        (64, 3, 1.18, 1.28),
        (512, 8, 1.02, 1.03),
        (512, 4, 1.04, 1.06),
        (512, 1, 1.06, 1.10),
    ],
)
def test_smaller_fragments_and_cold_calls_may_take_longer(
    blocks: int, kib: int, warm: float, cold: float
) -> None:
    for state, target in ((WARM, warm), (COLD, cold)):
        verdicts = [
            targets(a_cell(100 * ratio, 1, kib, blocks, state), state)[OVER_BIG]
            for ratio in (target - 0.001, target + 0.001)
        ]
        assert verdicts[0].target == target
        assert [verdict.met for verdict in verdicts] == [True, False]


@pytest.mark.parametrize(("state", "more"), [(WARM, 5), (COLD, 20)])
def test_one_block_may_take_some_microseconds_more_than_the_reference(
    state: str, more: float
) -> None:
    for total, met in ((50 + more - 0.1, True), (50 + more + 0.1, False)):
        found = targets(a_cell(total, blocks=1, state=state), state)
        assert found[OVER_REFERENCE].met == met
        assert OVER_BIG not in found


@pytest.mark.parametrize(
    ("blocks", "warm", "cold"), [(1, 0.7, 0.8), (8, 1.3, 1.0), (64, 1.5, 1.1), (512, 3.0, 1.5)]
)
def test_the_call_may_take_longer_for_more_blocks(blocks: int, warm: float, cold: float) -> None:
    for state, target in ((WARM, warm), (COLD, cold)):
        for ratio, met in ((target - 0.01, True), (target + 0.01, False)):
            cell = a_cell(1, 10 * ratio, blocks=blocks, state=state)
            assert targets(cell, state)[CALL_OVER_REFERENCE].met == met


@pytest.mark.parametrize(("state", "best"), [(WARM, 180), (COLD, 199)])
def test_a_shape_that_peers_were_measured_with_is_to_be_no_slower_than_the_best_of_them(
    state: str, best: float
) -> None:
    for total, met in ((best, True), (best + 1, False)):
        cell = a_cell(total, 1, 4, 8, state, layers=160, direction="load")
        assert targets(cell, state)[PEER].met == met


def test_the_table_has_a_row_for_each_shape_and_says_what_was_missed() -> None:
    cells = [a_cell(104, 16), a_cell(106, 15, direction="load"), a_cell(103)]
    said = tables(cells, targets)
    assert "layers one by one, store" in said
    assert "layers one by one, load" in said
    assert said.count("2 x 8 KiB") == 3
    assert "64 1.04 (1.05) [1.04 1.04] 0.50 2.08 16" in " ".join(said.split())
    assert "1.06 (1.05) !" in said
    assert "1.60 (1.50) !" in said
    assert "!" not in tables(cells, no_targets).split("\n\n", 1)[1]
    assert list(counts(cells, targets)) == [
        "total / big copy: 2 met, 1 missed",
        "call / R's call: 2 met, 1 missed",
    ]
    assert list(counts(cells, no_targets)) == []


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


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_every_cell_is_in_the_file(
    device: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "results" / "figures.json"
    assert bandwidth.main([*TINY, device, "--json", str(file)]) == 0
    figures = json.loads(file.read_text())
    assert figures["settings"] == {
        "samples": 2,
        "cold_samples": 1,
        "arrangements": list(ARRANGEMENTS),
        "time_limit": None,
        "other_mib": 1,
        "other_calls": 200,
        "copy_method": None,
        "staging_mib": 256,
    }
    assert figures["machine"]["torch"] == torch.__version__
    cells = figures["cells"]
    assert [
        (cell["arrangement"], cell["shape"]["layers"], cell["direction"], cell["blocks"])
        for cell in cells
    ] == [
        (arrangement, layers, direction, blocks)
        for arrangement in ARRANGEMENTS
        for layers in (3, 1)
        for direction in ("store", "load")
        for blocks in (1, 8)
    ]
    assert len(figures["verdicts"]) == (2 * 2 * len(cells) if device == "cuda" else 0)
    for cell in cells:
        assert cell["wrong"] == 0
        for state, count in ((WARM, 2), (COLD, 1)):
            found = cell["states"][state]
            assert found["count"] == count
            for way in (OURS, BIG, REFERENCE):
                times = found["samples"][way]
                assert len(times["total_us"]) == len(times["submit_us"]) == count
                assert min(times["total_us"] + times["submit_us"]) > 0
            if device == "cpu":
                assert found["copy_methods"] == {OURS: ["host"]}
    said = capsys.readouterr()
    assert "3 x 1 KiB" in said.out
    assert "blocks and pages with wrong bytes: 0" in said.out
    assert "bandwidth 100 %" in said.err


@pytest.mark.parametrize(("wrong", "code"), [(0, 0), (1, 1)])
def test_wrong_bytes_end_the_program_with_1(
    wrong: int, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = a_cell(1000)  # a missed target does not
    cell.wrong = wrong
    monkeypatch.setattr(bandwidth, "measure_all", lambda *_, **__: [cell])
    assert bandwidth.main([*TINY, "cpu"]) == code
