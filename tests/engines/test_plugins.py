"""What serving engines install beside themselves does not stop our tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_pytest_starts_where_pytest_asyncio_is_installed(tmp_path):
    """vLLM's test extras install it. It warns when it starts, and warnings are errors here."""
    metadata = tmp_path / "pytest_asyncio-1.5.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Name: pytest_asyncio\nVersion: 1.5.0\n")
    (metadata / "entry_points.txt").write_text("[pytest11]\nasyncio = pytest_asyncio\n")
    (tmp_path / "pytest_asyncio.py").write_text(
        "import warnings\ndef pytest_configure(config):\n    warnings.warn('scope is unset')\n"
    )
    test = tmp_path / "test_it.py"
    test.write_text("def test_it():\n    pass\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    run = subprocess.run(
        [*command, f"--rootdir={ROOT}", "-c", str(ROOT / "pyproject.toml"), str(test)],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout + run.stderr
