"""The large table of the README has the committed figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import readme_table


def a_cell(direction: str, blocks: int, ratio: float, arrangement: str = "one") -> dict[str, Any]:
    def a_state(ours: float) -> dict[str, Any]:
        return {"total_us": {"over big copy": {"ours": [0, ours, 9]}}}

    return {
        "shape": {"layers": 2, "fragment_kib": 8},
        "arrangement": arrangement,
        "direction": direction,
        "blocks": blocks,
        "states": {"warm": a_state(ratio), "cold": a_state(2 * ratio)},
    }


def test_the_table_has_medians_of_the_first_arrangement_warm_and_cold() -> None:
    cells = [a_cell("store", 1, 1.5), a_cell("store", 8, 1.25)]
    cells += [a_cell("load", 1, 1.4), a_cell("load", 8, 1.125), a_cell("load", 8, 7, "other")]
    figures = {"settings": {"arrangements": ["one", "other"]}, "cells": cells}
    assert readme_table.markdown(figures).splitlines() == [
        "| one: fragments per block | 1 block | 8 blocks |",
        "| --- | --- | --- |",
        "| 2 x 8 KiB | 1.50 / 1.40 | 1.25 / 1.12 |",
        "| 2 x 8 KiB, cold | 3.00 / 2.80 | 2.50 / 2.25 |",
    ]


def test_the_readme_has_the_committed_figures() -> None:
    table = readme_table.markdown(json.loads(readme_table.FILE.read_text()))
    assert f"\n\n{table}\n\n" in readme_table.README.read_text()


def test_the_page_about_benchmarks_has_the_committed_figures_of_another_gpu() -> None:
    figures = json.loads(readme_table.FILE.with_name("bandwidth-h100.json").read_text())
    page = readme_table.README.with_name("docs") / "benchmarks.md"
    assert f"\n\n{readme_table.markdown(figures)}\n\n" in page.read_text()


@pytest.mark.parametrize(("tables", "code"), [(1, 0), (0, 2), (2, 2)])
def test_the_table_is_written_over_the_one_that_is_there(
    tables: int, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = "| one tensor: fragments per block | 1 block |\n| --- | --- |\n| 1 x 1 KiB | 1 |\n"
    text = "before\n\n" + (old + "\n") * tables + "after | it\n"
    readme, figures = tmp_path / "README.md", tmp_path / "figures.json"
    readme.write_text(text)
    cells = [a_cell("store", 1, 1.5), a_cell("load", 1, 1.4)]
    figures.write_text(json.dumps({"settings": {"arrangements": ["one"]}, "cells": cells}))
    monkeypatch.setattr(readme_table, "README", readme)
    monkeypatch.setattr(readme_table, "FILE", figures)
    assert readme_table.main(["--write"]) == code
    new = readme_table.markdown(json.loads(figures.read_text()))
    assert readme.read_text() == (f"before\n\n{new}\n\nafter | it\n" if code == 0 else text)
