"""The plots show the figures of the JSON files."""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import plot
import pytest

needs_matplotlib = pytest.mark.skipif(find_spec("matplotlib") is None, reason="no matplotlib")
MACHINE = {"gpu": "a GPU", "cpu": "a CPU", "torch": "2.11.0", "date": "2026-01-01"}


def a_bandwidth_cell(layers: int, direction: str, blocks: int, ratio: float) -> dict[str, Any]:
    def a_state(ours: float) -> dict[str, Any]:
        ratios = {"ours": [ours, ours, ours], "reference": [1, ours / 2, ours]}
        return {"total_us": {"over big copy": ratios}}

    return {
        "shape": {"layers": layers, "fragment_kib": 8},
        "arrangement": "one tensor",
        "direction": direction,
        "blocks": blocks,
        "states": {"warm": a_state(ratio), "cold": a_state(2 * ratio)},
    }


BANDWIDTH = {
    "benchmark": "bandwidth",
    "machine": MACHINE,
    "cells": [
        a_bandwidth_cell(160, "store", 1, 1.5),
        a_bandwidth_cell(160, "store", 8, 1.25),
        a_bandwidth_cell(3, "store", 8, 1.1),
        a_bandwidth_cell(160, "load", 8, 1.75),
    ],
}
INTERFERENCE = {
    "benchmark": "interference",
    "machine": MACHINE,
    "cells": [
        {
            "shape": {"layers": layers, "fragment_kib": 8},
            "arrangement": arrangement,
            "direction": direction,
            "compute": compute,
            "way": way,
            "lost_ms_per_gb": lost,
            "lost_spread": [lost - 0.5, lost + 1],
        }
        for arrangement in ("layers one by one", "one tensor")
        for layers in (64, 160)
        for direction in ("store", "load")
        for compute in ("decode", "GEMM")
        for way, lost in (("big copy", 1.0), ("auto", 2.0 * layers))
    ],
}


def a_file(folder: Path, figures: Any) -> Path:
    file = folder / f"{figures['benchmark']}-test.json"
    file.write_text(json.dumps(figures))
    return file


@pytest.fixture
def without_drawing(monkeypatch: pytest.MonkeyPatch) -> None:
    """matplotlib is there, as far as main() can see."""
    monkeypatch.setitem(sys.modules, "matplotlib", SimpleNamespace(use=lambda backend: None))


def test_a_shape_has_a_line_of_ratios_by_blocks() -> None:
    assert plot.panels(BANDWIDTH) == [("one tensor", "warm"), ("one tensor", "cold")]
    assert plot.lines(BANDWIDTH, "one tensor", "warm", "store", "ours") == {
        "160 x 8 KiB": ([1, 8], [1.5, 1.25]),
        "3 x 8 KiB": ([8], [1.1]),
    }
    cold = plot.lines(BANDWIDTH, "one tensor", "cold", "load", "ours")
    assert cold == {"160 x 8 KiB": ([8], [3.5])}
    reference = plot.lines(BANDWIDTH, "one tensor", "cold", "load", "reference")
    assert reference == {"160 x 8 KiB": ([8], [1.75])}
    assert plot.lines(BANDWIDTH, "one tensor", "cold", "load", "another") == {}


def test_peers_have_points_where_there_are_figures() -> None:
    points = plot.peer_points(BANDWIDTH, "one tensor", "cold", "store")
    assert points == {"160 x 8 KiB": ([1, 8], [2.92, 1.43])}


def test_a_way_has_a_bar_for_each_compute() -> None:
    assert plot.bars(INTERFERENCE, "one tensor", "load", "64 x 8 KiB") == {
        "big copy": {"decode": (1.0, 0.5, 2.0), "GEMM": (1.0, 0.5, 2.0)},
        "auto": {"decode": (128.0, 127.5, 129.0), "GEMM": (128.0, 127.5, 129.0)},
    }


def test_peers_have_bars_for_the_shape_that_they_were_measured_with() -> None:
    found = plot.bars(INTERFERENCE, "one tensor", "load", "160 x 8 KiB")
    assert found["SGLang"] == {"decode": (3.24, 3.24, 3.24)}


@pytest.mark.usefixtures("without_drawing")
def test_a_file_that_cannot_be_drawn_is_named_and_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad = (a_file(tmp_path, figures) for figures in (BANDWIDTH, {"benchmark": "duplex"}))
    assert plot.main([str(good), str(bad)]) == 2
    said = capsys.readouterr().err
    assert said == f"{bad} is not of bandwidth or interference, which are what can be drawn\n"
    assert {file.suffix for file in tmp_path.iterdir()} == {".json"}


def test_the_committed_files_are_drawn_by_default() -> None:
    assert plot.RESULTS / "bandwidth-h200.json" in plot._drawable()
    for file in plot._drawable():
        assert json.loads(file.read_text())["benchmark"] in plot.DRAWINGS


@needs_matplotlib
@pytest.mark.parametrize("figures", [BANDWIDTH, INTERFERENCE], ids=lambda one: one["benchmark"])
def test_a_picture_is_drawn(figures: Any, tmp_path: Path) -> None:
    file = a_file(tmp_path, figures)
    assert plot.main([str(file)]) == 0
    assert file.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
