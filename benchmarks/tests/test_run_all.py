"""`make bench` runs the benchmark programs and sums up their verdicts."""

from __future__ import annotations

from pathlib import Path

import pytest
import run_all

pytestmark = pytest.mark.slow  # of a benchmark program

# Writes what it is told to the file after --json, and ends with a code.
PROGRAM = """\
import json, sys
file = sys.argv[sys.argv.index("--json") + 1]
open(file, "w").write(json.dumps({{"verdicts": {verdicts}}}))
print("the table of", sys.argv[0].rpartition("/")[2])
sys.exit({code})
"""
VERDICTS = '[{"name": "a", "met": True}, {"name": "b", "met": False}, {"name": "c", "met": None}]'


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "benchmarks"
    folder.mkdir()
    for name in run_all.SHARES:
        (folder / f"{name}.py").write_text(PROGRAM.format(verdicts=VERDICTS, code=0))
    monkeypatch.setattr(run_all, "FOLDER", folder)
    return folder


def test_all_run_and_a_missed_target_is_no_failure(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_all.main([]) == 0
    said = capfd.readouterr().out
    for name in run_all.SHARES:
        assert f"== {name}\n\nthe table of {name}.py" in said
    assert said.count("missed: b") == len(run_all.SHARES)


def test_a_benchmark_that_fails_does_not_keep_the_others_from_running(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bandwidth.json").write_text("of an earlier run")
    (folder / "bandwidth.py").write_text("raise SystemExit('out of memory')")
    (folder / "submit_cost.py").write_text(PROGRAM.format(verdicts="[]", code=1))
    assert (
        run_all.main(
            ["--only", "bandwidth", "submit_cost", "copy_methods", "--json", str(tmp_path)]
        )
        == 1
    )
    out, err = capfd.readouterr()
    assert "out of memory" in err
    assert out.count("FAILED, or wrong bytes: see above") == 2
    assert "the table of copy_methods.py" in out
