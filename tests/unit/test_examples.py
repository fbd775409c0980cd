"""The examples run; each compares bytes and fails if they are wrong.

On the CPU jobs end late, so that a forgotten wait shows.
"""

from pathlib import Path

import pytest
from processes import run_script

ROOT = Path(__file__).parents[2]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "example",
    # That one is for another engine: tests/engines/test_nano_vllm.py.
    sorted({*(ROOT / "examples").glob("*.py")} - {ROOT / "examples" / "nano_vllm.py"}),
    ids=lambda path: path.stem,
)
def test_an_example_runs(
    example: Path, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVSWAP_LATE_CPU", "1")
    script = f"import runpy; runpy.run_path({str(example)!r}, run_name='__main__')"
    assert run_script(script, "--device", device, folder=tmp_path)
