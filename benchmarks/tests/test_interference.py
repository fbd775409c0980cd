"""The benchmark beside computations: it judges their losses right, and notices wrong bytes."""

from __future__ import annotations

from typing import Any

import interference
import pytest
import torch
from interference_report import Cell, Sample
from transfers import Shape

pytestmark = pytest.mark.slow  # of a benchmark program

TINY = ["--device", "cpu", "--shapes", "3x1", "--mib", "1", "--repeats", "2", "--seconds", "0.002"]


def a_cell(way: str, lost: float, speed: float, compute: str = "decode", kib: int = 8) -> Cell:
    """Three repeats, of which the last loses 1 ms/GB more."""
    samples = [Sample(50.0, 50.0 + 2 * (lost + more), 2.0, speed) for more in (0, 0, 1)]
    used = [] if way == "big copy" else ["staged"]
    return Cell(Shape(2, kib), "one tensor", "load", compute, way, samples, used, link=50.0)


def test_figures_are_medians_and_have_a_spread() -> None:
    cell = a_cell("auto", 4.0, 46.5)
    assert (cell.lost, cell.most_lost, cell.gb_per_s) == (4, 5, 46.5)
    figures = cell.to_json()
    assert figures["lost_spread"] == [4, 5]
    assert figures["gb_per_s_spread"] == [46.5, 46.5]
    assert figures["compute_ms"]["alone"]["count"] == 3


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


def test_bytes_that_are_wrong_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    note = interference.HandlerWay.start

    def start(way: Any) -> Any:
        way._blocks.layout.tensors[0][0, 0] += 1  # a block that no transfer has
        return note(way)

    monkeypatch.setattr(interference.HandlerWay, "start", start)
    assert interference.main(TINY) == 1
