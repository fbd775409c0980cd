"""The program that times submissions on a device that torch drives."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from fake_accelerator import needs_compiler
from fake_accelerator.tests import environment

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "generic_submit.py"


@needs_compiler
def test_it_times_stores_and_loads_beside_bare_torch() -> None:
    arguments = ["--fake-accelerator", "--samples", "2", "--blocks", "1", "3"]
    done = subprocess.run(
        [sys.executable, str(PROGRAM), *arguments],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    header, *lines = done.stdout.splitlines()
    assert header.split()[-4:] == ["idle", "behind", "work", "torch"]
    assert [line.split()[:2] for line in lines] == [
        [direction, blocks] for blocks in ("1", "3") for direction in ("store", "load")
    ]
    assert all(float(figure) > 0 for line in lines for figure in line.split()[3:])
