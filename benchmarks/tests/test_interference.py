"""The benchmark beside computations: it judges their losses right, and notices wrong bytes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import interference
import pytest
import torch
from blocks import ARRANGEMENTS
from expecttest import assert_expected_inline
from interference_report import Cell, Sample, judge, tables
from transfers import Shape

pytestmark = pytest.mark.slow  # of a benchmark program

TINY = ["--device", "cpu", "--shapes", "3x1", "--mib", "1", "--repeats", "2", "--seconds", "0.002"]


def a_cell(way: str, lost: float, speed: float, compute: str = "decode", kib: int = 8) -> Cell:
    """Three repeats, of which the last loses 1 ms/GB more."""
    samples = [Sample(50.0, 50.0 + 2 * (lost + more), 2.0, speed) for more in (0, 0, 1)]
    used = [] if way == "big copy" else ["staged"]
    return Cell(Shape(2, kib), "one tensor", "load", compute, way, samples, used, link=50.0)


CELLS = [
    a_cell("big copy", 2.0, 50.0),
    a_cell("auto", 4.0, 46.5),
    a_cell("copy engines only", 3.0, 30.0),
]


def test_figures_are_medians_and_have_a_spread() -> None:
    cell = a_cell("auto", 4.0, 46.5)
    assert (cell.lost, cell.most_lost, cell.gb_per_s) == (4, 5, 46.5)
    figures = cell.to_json()
    assert figures["lost_spread"] == [4, 5]
    assert figures["gb_per_s_spread"] == [46.5, 46.5]
    assert figures["samples"][2] == {"floor_ms": 50, "ms": 60, "gb": 2, "gb_per_s": 46.5}


def test_what_may_be_lost_follows_from_what_a_big_copy_costs() -> None:
    assert_expected_inline(
        "\n".join(map(str, judge(CELLS))),
        """\
met          load of 2 x 8 KiB, one tensor, beside decode, share of the link: 0.93, at least 0.93
met          load of 2 x 8 KiB, one tensor, beside decode, lost ms/GB: 4, at most 4
met          load of 2 x 8 KiB, one tensor, beside decode, copy engines only, lost ms/GB: 3, at most 3""",
    )


def test_one_that_loses_more_or_is_slower_misses() -> None:
    cells = [CELLS[0], a_cell("auto", 4.1, 46.4), a_cell("copy engines only", 3.1, 50)]
    assert [verdict.met for verdict in judge(cells)] == [False, False, False]


def test_beside_a_gemm_that_holds_every_sm_small_fragments_have_no_target_for_their_speed() -> None:
    cells = []
    for kib in (8, 4):
        cells += [
            a_cell("big copy", 2.0, 50.0, "GEMM", kib),
            a_cell("auto", 40.0, 30.0, "GEMM", kib),
            a_cell("copy engines only", 3.0, 30.0, "GEMM", kib),
        ]
    assert_expected_inline(
        "\n".join(map(str, judge(cells))),
        """\
met          load of 2 x 8 KiB, one tensor, beside GEMM, share of the link: 0.60, at least 0.60
met          load of 2 x 8 KiB, one tensor, beside GEMM, copy engines only, lost ms/GB: 3, at most 3
met          load of 2 x 4 KiB, one tensor, beside GEMM, copy engines only, lost ms/GB: 3, at most 3""",
    )


def test_each_repeat_has_a_floor_of_its_own_and_the_ways_in_another_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order: list[Any] = []

    def beside(compute: str, way: str | None) -> tuple[float, float, float]:
        order.append(way)
        return (float(len(order)), 1.0, 2.0)

    monkeypatch.setattr(interference, "beside", beside)
    samples = interference.measure("compute", {"big copy": "big", "auto": "ours"}, 2, float("inf"))
    assert order == [None, "big", "ours", None, "ours", "big", None, "big", "ours"]
    assert samples["auto"] == [Sample(4, 5, 1, 2), Sample(7, 9, 1, 2)]
    assert [sample.lost for sample in samples["big copy"]] == [2, 1]


def test_a_limit_of_time_leaves_two_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interference, "beside", lambda compute, way: (1.0, 1.0, 1.0))
    samples = interference.measure("compute", {"auto": "ours"}, 9, 0.0)
    assert len(samples["auto"]) == interference.LEAST == 2


def test_the_table_of_a_shape_that_peers_were_measured_with_has_them() -> None:
    samples = [Sample(50.0, 54.0, 2.0, 50.0)]
    cells = [
        Cell(Shape(layers, 8), "one tensor", "store", "decode", "auto", samples, ["staged"], 55.0)
        for layers in (160, 80)
    ]
    _, first, second = tables(cells).split("\n\n")
    rows = [line.split() for line in first.splitlines()]
    assert ["auto", "staged", "2.00", "50.00"] in rows
    assert ["vLLM", "-", "0.23", "10.00"] in rows
    assert "vLLM" not in second


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_every_cell_is_in_the_file(
    device: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "figures.json"
    assert interference.main([*TINY, "--device", device, "--json", str(file)]) == 0
    figures = json.loads(file.read_text())
    assert figures["settings"] == {
        "repeats": 2,
        "seconds": 0.002,
        "mib": 1,
        "arrangements": list(ARRANGEMENTS),
        "staging_mib": 256,
        "time_limit": None,
        "CUDA_DEVICE_MAX_CONNECTIONS": os.environ["CUDA_DEVICE_MAX_CONNECTIONS"],  # of conftest.py
    }
    kinds = [(one["arrangement"], one["direction"], one["way"]) for one in figures["cells"]]
    ways = ("big copy", "reference", "auto", "copy engines only")
    if device == "cpu":
        assert kinds == [
            (arrangement, direction, way)
            for arrangement in ARRANGEMENTS
            for direction in ("store", "load")
            for way in ways
        ]
        assert figures["verdicts"] == []
    else:
        assert {*ways} <= {one["way"] for one in figures["cells"]}
        assert len(figures["verdicts"]) == 2 * 2 * (3 * 3 + 1)
    for cell in figures["cells"]:
        assert len(cell["samples"]) == 2
        assert cell["gb_per_s"] > 0
    said = capsys.readouterr()
    assert "blocks and pages with wrong bytes: 0" in said.out
    assert "interference 100 %" in said.err


@pytest.mark.parametrize("wrong", [0, 1])
def test_wrong_bytes_end_the_program_with_1(wrong: int, monkeypatch: pytest.MonkeyPatch) -> None:
    cells = [a_cell("big copy", 1, 1), a_cell("auto", 100, 1), a_cell("copy engines only", 100, 1)]
    monkeypatch.setattr(interference, "measure_all", lambda *_: (cells, wrong))  # missed targets
    assert interference.main(TINY) == wrong


def test_bytes_that_are_wrong_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    note = interference.HandlerWay.start

    def start(way: Any) -> Any:
        way._blocks.layout.tensors[0][0, 0] += 1  # a block that no transfer has
        return note(way)

    monkeypatch.setattr(interference.HandlerWay, "start", start)
    assert interference.main(TINY) == 1
