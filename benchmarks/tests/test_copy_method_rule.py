"""The rule of docs/copy_methods.md against what was measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from torch_kvswap._native.loader import native

RESULTS = sorted((Path(__file__).parents[1] / "results").glob("copy_methods-*.json"))


@pytest.mark.parametrize("file", RESULTS, ids=lambda file: file.stem)
def test_the_rule_is_within_3_percent_of_best(file: Path) -> None:
    """In sum over all cells."""
    chosen = best = 0.0
    for cell in json.loads(file.read_text())["cells"]:
        layers, fragment = cell["shape"]["layers"], cell["shape"]["fragment_kib"] << 10
        runs = 1 if cell["arrangement"] == "one tensor" else layers
        method, *_ = native.preferred_copy_methods(
            *(layers * fragment, layers, runs, layers, cell["blocks"]),
            is_store=cell["direction"] == "store",
        )
        for state in cell["states"].values():
            quartiles = state["total_us"]["quartiles"]
            median = {way: of_way[1] for way, of_way in quartiles.items()}
            forced = [median[way] for way in native.copy_methods() if way in median]
            chosen += median[method]
            best += min(forced)
    assert 0 < chosen < 1.03 * best
