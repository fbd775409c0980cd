"""The program that times submissions on a device that torch drives."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from fake_accelerator import needs_compiler
from fake_accelerator.tests import environment
from generic_submit import Cell, table
from timing import Spread

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "benchmarks" / "generic_submit.py"


def cells_of(file: Path) -> list[Cell]:
    cells = json.loads(file.read_text())["cells"]
    return [
        Cell(**{name: Spread(**of) if isinstance(of, dict) else of for name, of in cell.items()})
        for cell in cells
    ]


@pytest.mark.slow
@needs_compiler
def test_it_times_stores_and_loads_beside_bare_torch(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    arguments = ["--fake-accelerator", "--samples", "2", "--blocks", "1", "3", "--json", str(file)]
    done = subprocess.run(
        [sys.executable, str(PROGRAM), *arguments],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    cells = cells_of(file)
    assert table(cells) in done.stdout
    assert [(cell.blocks, cell.direction, cell.wrong) for cell in cells] == [
        (blocks, direction, 0) for blocks in (1, 3) for direction in ("store", "load")
    ]
    assert all(
        times.median > 0 for cell in cells for times in (cell.idle, cell.behind_work, cell.by_hand)
    )
