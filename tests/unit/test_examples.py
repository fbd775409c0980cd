"""The examples run; each compares bytes and fails if they are wrong.

On the CPU jobs end late, so that a forgotten wait shows.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from patience import PATIENCE

ROOT = Path(__file__).parents[2]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


WITHOUT_WAITS = """
import runpy, sys, torch_kvswap
torch_kvswap.Job.wait = lambda *_, **__: None
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run_late(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        timeout=3 * PATIENCE,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "KVSWAP_LATE_CPU": "1"},
    )


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "example", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.stem
)
def test_an_example_runs(example: Path, device: str, tmp_path: Path) -> None:
    done = run_late(tmp_path, str(example), "--device", device)
    assert done.returncode == 0, done.stderr
    assert done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", ["layerwise_load", "own_engine", "hybrid_model"])
def test_as_a_control_an_example_fails_without_its_waits(name: str, tmp_path: Path) -> None:
    example = str(ROOT / "examples" / f"{name}.py")
    done = run_late(tmp_path, "-c", WITHOUT_WAITS, example, "--device", "cpu")
    assert done.stderr.splitlines()[-1] == "AssertionError"
