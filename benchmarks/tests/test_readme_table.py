"""The table of the README has the committed figures."""

from __future__ import annotations

from typing import Any

import readme_table


def a_cell(direction: str, blocks: int, arrangement: str = "one", **ways: float) -> dict[str, Any]:
    ratios = {name: [0, ratio, 9] for name, ratio in ways.items()}
    return {
        "shape": {"layers": 160, "fragment_kib": 8},
        "arrangement": arrangement,
        "direction": direction,
        "blocks": blocks,
        "states": {"cold": {"total_us": {"over big copy": ratios}}},
    }


def test_the_table_has_cold_medians_of_the_first_arrangement_and_of_the_ways_measured() -> None:
    cells = [a_cell("store", 1, ours=1.5, reference=1.75, vLLM=17)]
    cells += [a_cell("load", 1, ours=1.4, reference=2, vLLM=9), a_cell("load", 8, "other", ours=7)]
    figures = {"settings": {"arrangements": ["one", "other"]}, "cells": cells}
    assert readme_table.markdown(figures).splitlines() == [
        "| one: fragments per block | blocks | torch_kvswap | vLLM | plain PyTorch copy |",
        "| --- | --- | --- | --- | --- |",
        "| 160 x 8 KiB | 1 | 1.50 / 1.40 | 17.00 / 9.00 | 1.75 / 2.00 |",
    ]


def test_the_readme_has_the_committed_figures() -> None:
    assert f"\n\n{readme_table.readme_table()}\n\n" in readme_table.README.read_text()
