"""`python -m torch_kvswap bench` runs the programs of the checkout and sums up their verdicts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from expecttest import assert_expected_inline

from torch_kvswap.cli import bench
from torch_kvswap.cli.bench import Outcome, summary

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
    for name in bench.BENCHMARKS:
        (folder / f"{name}.py").write_text(PROGRAM.format(verdicts=VERDICTS, code=0))
    monkeypatch.setattr(bench, "FOLDER", folder)
    return folder


def test_every_benchmark_is_a_program_of_the_checkout() -> None:
    for name in bench.BENCHMARKS:
        assert (bench.FOLDER / f"{name}.py").is_file()


def test_all_run_and_a_missed_target_is_no_failure(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert bench.main([]) == 0
    said = capfd.readouterr().out
    for name in bench.BENCHMARKS:
        assert f"== {name}\n\nthe table of {name}.py" in said
    assert said.count("missed: b") == len(bench.BENCHMARKS)


def test_only_the_named_ones_run_and_their_files_are_kept(folder: Path, tmp_path: Path) -> None:
    kept = tmp_path / "kept" / "here"
    assert bench.main(["--only", "paths", "duplex", "--json", str(kept)]) == 0
    assert {file.name for file in kept.iterdir()} == {"paths.json", "duplex.json"}
    assert len(json.loads((kept / "paths.json").read_text())["verdicts"]) == 3


def test_a_benchmark_that_fails_does_not_keep_the_others_from_running(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bandwidth.json").write_text("of an earlier run")
    (folder / "bandwidth.py").write_text("raise SystemExit('out of memory')")
    (folder / "duplex.py").write_text(PROGRAM.format(verdicts="[]", code=1))
    assert bench.main(["--only", "bandwidth", "duplex", "paths", "--json", str(tmp_path)]) == 1
    out, err = capfd.readouterr()
    assert "out of memory" in err
    assert out.count("FAILED, or wrong bytes: see above") == 2
    assert "the table of paths.py" in out


def test_without_a_checkout_it_is_said_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "FOLDER", Path("/no/benchmarks"))
    assert bench.main([]) == 2
    assert_expected_inline(
        capsys.readouterr().err,
        """\
torch_kvswap bench: no benchmarks in /no/benchmarks, because a wheel does not have them; run this command in a checkout of torch_kvswap
""",
    )


def test_an_unknown_name_is_a_user_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        bench.main(["--only", "dance"])
    assert caught.value.code == 2
    assert "invalid choice: 'dance'" in capsys.readouterr().err


def test_the_summary_is_short() -> None:
    missed = [f"target {number}" for number in range(7)]
    outcomes = [
        Outcome("bandwidth", 61.25, False, [True] * 105 + [False] * 7, missed),
        Outcome("duplex", 5, True, [], []),
        Outcome("paths", 30, False, [True, None], []),
    ]
    assert_expected_inline(
        summary(outcomes),
        """\

benchmark        met  missed  not measured  seconds
bandwidth        105       7             0     61.2
duplex             0       0             0      5.0  FAILED, or wrong bytes: see above
paths              1       0             1     30.0
missed: target 0
missed: target 1
missed: target 2
missed: target 3
missed: target 4
missed: and 2 more of bandwidth""",
    )


def test_a_tiny_benchmark_of_the_checkout_runs(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert bench.main(["--only", "duplex", "--json", str(tmp_path)]) == 0
    assert json.loads((tmp_path / "duplex.json").read_text())["benchmark"] == "duplex"
    out, err = capfd.readouterr()
    assert "blocks and pages with wrong bytes: 0" in out
    assert "duplex 100 %" in err
