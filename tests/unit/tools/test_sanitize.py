"""tools/sanitize.py without a sanitizer, and what it shares with tools/measure_coverage.py."""

import importlib
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture
def sanitize(monkeypatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    return importlib.import_module("sanitize")


@pytest.fixture
def instrumented(monkeypatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    return importlib.import_module("instrumented")


def make_compiler(folder: Path, answer: str) -> str:
    compiler = folder / "compiler"
    compiler.write_text(f"#!/bin/sh\necho {answer}\n")
    compiler.chmod(0o755)
    return str(compiler)


def test_a_compiler_without_the_sanitizer_is_named_with_what_to_install(
    sanitize, monkeypatch, tmp_path
):
    compiler = make_compiler(tmp_path, "libtsan.so")  # no folder: it has none
    monkeypatch.setenv("CXX", compiler)
    with pytest.raises(SystemExit, match=rf"{compiler} has no libtsan\.so\. Install g\+\+ with"):
        sanitize.find_runtime(("libtsan.so",))


def test_the_files_of_the_compiler_are_preloaded_in_their_order(sanitize, monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", make_compiler(tmp_path, '/lib/"${1#*=}"'))
    found = sanitize.find_runtime(("libasan.so", "libstdc++.so.6"))
    assert found == "/lib/libasan.so:/lib/libstdc++.so.6"


def test_a_python_that_does_not_start_is_told_with_what_it_said(sanitize, monkeypatch, tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho unexpected memory mapping >&2; exit 1\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(SystemExit, match=r"(?s)does not start with .*unexpected memory mapping"):
        sanitize.find_starter({"LD_PRELOAD": ""})


def test_named_tests_take_the_place_of_all_and_options_are_added(sanitize):
    named = ["-x", "tests/unit/tools/test_sanitize.py::test_it"]
    assert sanitize.find_tests(named) == named
    everything = sanitize.find_tests(["-x"])
    assert everything[0] == "tests/support/sanitizers/controls.py"
    assert everything[-1] == "-x"
    assert {"tests/unit/test_handler.py", "tests/sim/test_scheduler.py"} <= {*everything}


@pytest.mark.parametrize("name", ["tsan", "asan"])
def test_a_test_that_is_left_out_exists(sanitize, name):
    for left_out in sanitize.LEFT_OUT[name]:
        file, _, function = left_out.partition("::")
        assert f"def {function}(" in (ROOT / "tests" / file).read_text()


def test_tests_on_the_fake_accelerator_are_left_out(sanitize, monkeypatch, tmp_path):
    files = [tmp_path / "tests" / folder / "test_handler.py" for folder in ("devices", "sim")]
    for file in files:
        file.parent.mkdir(parents=True)
        file.touch()
    monkeypatch.setattr(sanitize, "ROOT", tmp_path)
    monkeypatch.setattr(sanitize, "ON_FAKE_ACCELERATOR", files[0].parent)
    controls = "tests/support/sanitizers/controls.py"
    assert sanitize.find_tests([]) == [controls, "tests/sim/test_handler.py"]
    monkeypatch.undo()
    assert (sanitize.ON_FAKE_ACCELERATOR / "test_fake_accelerator.py").exists()


def test_the_copy_has_no_library_and_no_test_that_is_gone(instrumented, monkeypatch, tmp_path):
    monkeypatch.setattr(instrumented, "ROOT", tmp_path)
    monkeypatch.setattr(instrumented, "COPIED", ("package",))
    (tmp_path / "package").mkdir()
    (tmp_path / "settings").touch()
    for file in ("a.py", "b.py", "_C.so"):
        (tmp_path / "package" / file).touch()
    copy = tmp_path / "build"
    instrumented.make_copy(copy, ["settings"])
    (tmp_path / "package" / "b.py").unlink()
    instrumented.make_copy(copy, ["settings"])
    assert sorted(path.name for path in copy.rglob("*")) == ["a.py", "package", "settings"]


def test_a_report_fails_the_test_during_which_it_appears(tmp_path):
    (tmp_path / "test_it.py").write_text(
        "import pathlib\n"
        "def test_with_a_report(): pathlib.Path('reports/of_a_child').write_text('data race')\n"
        "def test_without_one(): pass\n"
    )
    (tmp_path / "reports").mkdir()
    plugin = {
        "PYTHONPATH": str(ROOT / "tests" / "support" / "sanitizers"),
        "KVSWAP_REPORTS": "reports",
    }
    command = [sys.executable, "-m", "pytest", "-p", "no_reports", "-p", "no:cacheprovider"]
    environment = {**os.environ, **plugin}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert "ERROR test_it.py::test_with_a_report - Failed: data race" in done.stdout
    assert "2 passed, 1 error" in done.stdout
