"""Every program runs without a GPU, finds right bytes, and leaves its figures in a file."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.slow  # of benchmark programs

SHAPES = "--shapes 3x4 1x2 --other-mib 1 --samples 2 --cold-samples 1"
# By program: small arguments, and the number of cells that they give.
PROGRAMS = {
    "bandwidth": (f"{SHAPES} --blocks 8 1", 16),
    "submit_cost": (f"{SHAPES} --blocks 1 8", 16),
    "duplex": (f"{SHAPES} --blocks 4", 4),
    "copy_methods": (f"{SHAPES} --blocks 1 8", 16),
    "encoding": (f"{SHAPES} --blocks 1 8 --repeats 1 --bits 12.5", 12),
    "interference": ("--shapes 3x4 --repeats 2 --seconds 0.002 --mib 1", 16),
    "host_memory": ("--gib 0.01 --samples 2 --seconds 0.01", None),
    "outstanding": ("--jobs 300", None),
}


def wrong_counts(figures: Any) -> Iterator[int]:
    """All numbers called `wrong`, at any depth."""
    if isinstance(figures, dict):
        for name, value in figures.items():
            if name == "wrong":
                yield value
            else:
                yield from wrong_counts(value)
    elif isinstance(figures, list):
        for value in figures:
            yield from wrong_counts(value)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_runs_and_leaves_its_figures(
    name: str, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = importlib.import_module(name)
    monkeypatch.setattr(program, "OUTPUTS", 1000, raising=False)  # of submit_cost
    arguments, cells = PROGRAMS[name]
    file = tmp_path / "figures.json"
    assert program.main([*arguments.split(), "--device", device, "--json", str(file)]) == 0
    figures = json.loads(file.read_text())
    assert (figures["benchmark"], figures["machine"]["torch"]) == (name, torch.__version__)
    assert set(wrong_counts(figures)) <= {0}
    if device == "cpu" and cells is not None:
        assert len(figures["cells"]) == cells
