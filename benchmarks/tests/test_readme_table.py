"""The large table of the README has the committed figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import readme_table

README = Path(__file__).parents[2] / "README.md"


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
    assert readme_table.markdown(json.loads(readme_table.FILE.read_text())) in README.read_text()
