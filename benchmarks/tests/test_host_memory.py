"""The benchmark of host memory: it judges its figures right, and notices memory that is not
zero.
"""

from __future__ import annotations

import json
from pathlib import Path

import host_memory
import pytest
import torch
from host_memory_report import Beside, Cell, judge, tables

pytestmark = pytest.mark.slow  # of a benchmark program

TINY = ["--device", "cpu", "--gib", "0.01", "--samples", "2", "--seconds", "0.01"]


def a_cell(name: str, ready: float, huge: int | None = None) -> Cell:
    cell = Cell(name, 4 << 30)
    for _ in range(3):
        cell.add(ready, 0.4, 4 << 30, huge)
    return cell


def test_the_target_is_a_quarter_of_torchs_time() -> None:
    met = [judge([a_cell("torch", 2), a_cell("HostPool", ready)])[0].met for ready in (0.5, 0.6)]
    assert met == [True, False]


def test_it_runs_without_a_gpu_and_leaves_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "figures.json"
    assert host_memory.main([*TINY, "--json", str(file)]) == 0
    figures = json.loads(file.read_text())
    assert [cell["name"] for cell in figures["cells"]][:2] == ["torch", "HostPool"]
    assert all(len(cell["ready"]) == 2 for cell in figures["cells"])
    assert figures["beside"]["during_us"]
    assert "compute lost" in capsys.readouterr().out


def test_the_ways_are_measured_in_another_order_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[tuple[str, object, bool]] = []
    monkeypatch.setattr(
        host_memory, "take", lambda cell, make, counts: taken.append((cell.name, make, counts))
    )
    cells = host_memory.measure({"torch": 1, "HostPool": 2}, 1 << 20, 2)  # type: ignore[dict-item]
    assert [cell.name for cell in cells] == ["torch", "HostPool"]
    theirs, ours = ("torch", 1), ("HostPool", 2)
    assert [one[:2] for one in taken] == [ours, theirs, theirs, ours, ours, theirs]
    assert [counts for *_, counts in taken] == [False, False, True, True, True, True]


def test_the_p99_of_a_few_steps_is_not_above_the_longest() -> None:
    text = tables([a_cell("torch", 2)], Beside([100.0, 200.0], [100.0], 0.1))
    rows = [line.split() for line in text.splitlines()]
    assert ["alone", "2", "150.00", "199.00"] in rows
    assert ["while", "pinned", "1", "100.00", "100.00"] in rows


def test_memory_that_is_not_zero_is_wrong() -> None:
    cell = Cell("HostPool", 1 << 20)
    host_memory.take(cell, lambda nbytes: (torch.ones(nbytes, dtype=torch.uint8), None), True)
    assert cell.wrong == 1
    host_memory.take(cell, lambda nbytes: (torch.zeros(nbytes, dtype=torch.uint8), None), True)
    assert cell.wrong == 1
