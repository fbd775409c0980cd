"""compare.py names what has changed by more than the spread, and refuses what cannot be compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import compare
import pytest


def a_run(*quartiles: list[float], benchmark: str = "bandwidth", gpu: str = "one") -> Any:
    cells = [
        {
            "shape": {"layers": 2},
            "blocks": number,
            "wrong": 0,
            "total_us": {"quartiles": {"ours": of}},
        }
        for number, of in enumerate(quartiles)
    ]
    return {"benchmark": benchmark, "machine": {"gpu": gpu, "date": gpu}, "cells": cells}


def compared(folder: Path, before: Any, after: Any) -> int:
    for name, run in (("before", before), ("after", after)):
        (folder / name).write_text(json.dumps(run))
    return compare.main([str(folder / "before"), str(folder / "after")])


def test_only_medians_whose_quartiles_lie_apart_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = a_run([8, 10, 12], [8, 10, 12], [8, 10, 12])
    after = a_run([12, 15, 16], [13, 15, 16], [5, 7, 7.5])
    assert compared(tmp_path, before, after) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2:] == [
        "| 2, 1 total_us ours | 10 | 15 | 1.500 |",
        "| 2, 2 total_us ours | 10 | 7 | 0.700 |",
        "2 of 3 medians changed by more than the spread",
    ]


@pytest.mark.parametrize(
    ("after", "said"),
    [
        (a_run([1, 2, 3], benchmark="peers"), "different programs: bandwidth and peers"),
        (a_run([1, 2, 3], gpu="other"), "different machines: gpu one and other"),
        (a_run(), "the runs of bandwidth have no quartiles in common"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], after: Any, said: str
) -> None:
    assert compared(tmp_path, a_run([1, 2, 3]), after) == 2
    assert said in capsys.readouterr().err
