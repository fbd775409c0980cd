"""tools/build_wheel.py: the wheel works without the sources, and none is left that would not."""

import ctypes
import errno
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest
from processes import in_child

import torch_kvswap as kvs
from torch_kvswap._native.loader import native

ROOT = Path(__file__).parents[3]
MANYLINUX = ROOT / "tools" / "manylinux"
# What runs on the wheel: ops, handlers, allocations that fail, and the library as a file.
TESTS = [
    "tests/unit/ops/test_ops.py",
    "tests/unit/test_handler.py",
    "tests/sim/test_out_of_memory.py::test_every_job_ends_and_the_handler_works_on_whichever_allocation_fails[submit some]",
    "tests/sim/test_out_of_memory.py::test_a_block_manager_is_as_it_was_whichever_allocation_fails",
    "tests/unit/test_binary.py::test_it_needs_only_libraries_that_every_torch_has",
    "tests/unit/test_binary.py::test_it_needs_only_symbols_that_every_torch_has",
    "tests/unit/test_binary.py::test_it_shows_nothing_but_its_module",
    "tests/unit/test_binary.py::test_an_exception_of_an_op_is_no_longer_in_flight_when_python_has_it",
]


@pytest.fixture
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "build_wheel", MANYLINUX.parent / "build_wheel.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(*command: object, folder: Path, **variables: object) -> str:
    done = subprocess.run(
        list(map(str, command)),
        cwd=folder,
        env={**os.environ, **{name: str(value) for name, value in variables.items()}},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_wheel_is_small_installs_anywhere_and_works_without_the_sources(
    tool, monkeypatch, tmp_path
):
    monkeypatch.setenv("KVSWAP_CUDA", "1" if native.kernel_version() else "0")
    (wheel,) = tool.build_wheels([sys.executable], tmp_path / "dist")
    python = "cp{}{}".format(*sys.version_info)
    tags = "cp312-abi3" if sys.version_info >= (3, 12) else f"{python}-{python}"
    assert wheel.name == f"torch_kvswap-{kvs.__version__}-{tags}-{tool.PLATFORM}.whl"
    assert wheel.stat().st_size < 1.6e6

    installed, folder = tmp_path / "installed", tmp_path / "tests"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    run(*pip, "--target", installed, wheel, folder=tmp_path)
    shutil.copytree(ROOT / "tests", folder / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("conftest.py", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
    for name in ("csrc", "build"):  # the simulated driver is compiled from one into the other
        (folder / name).symlink_to(ROOT / name)
    where = "import torch_kvswap as k; print(k._native.loader.native.__file__)"
    library = run(sys.executable, "-c", where, folder=folder, PYTHONPATH=installed)
    assert Path(library).is_relative_to(installed)
    pytest_ = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "-m",
        "not gpu and not slow",
    ]
    report = run(*pytest_, *TESTS, folder=folder, PYTHONPATH=installed)
    assert re.search(r"^=+ \d+ passed", report, re.MULTILINE)


@pytest.fixture
def sources(tool, monkeypatch, tmp_path) -> Path:
    """Stands in for the sources: setup.py makes a wheel with the library library.so."""
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "setup.py").write_text(
        "import pathlib, sys, zipfile\n"
        "pathlib.Path(sys.argv[-1]).mkdir(parents=True)\n"
        "with zipfile.ZipFile(sys.argv[-1] + '/torch_kvswap.whl', 'w') as wheel:\n"
        "    wheel.write('library.so', 'torch_kvswap/_C.so')\n"
    )
    monkeypatch.setattr(tool, "unpack_sources", lambda _: folder)
    return folder


def test_functions_that_are_too_new_are_named_and_no_wheel_is_left(tool, sources, tmp_path):
    (sources / "new.cpp").write_text(
        "#include <cmath>\n#include <new>\n"
        "double f(double x) { return std::exp2(x) + std::sqrt(x); }\n"
        "void g() { throw std::bad_array_new_length(); }\n"
    )
    run("g++", "-shared", "-fPIC", "new.cpp", "-lm", "-o", "library.so", folder=sources)
    destination = tmp_path / "dist"
    with pytest.raises(SystemExit) as stop:
        tool.build_wheels([sys.executable], destination)
    assert str(stop.value) == (
        "torch_kvswap: torch_kvswap/_C.so does not run with glibc 2.28: it needs exp2@GLIBC_2.29. "
        f"Name older versions in {MANYLINUX}/old_versions.h, or define what is missing in "
        "missing.cpp beside it."
    )
    assert not destination.exists()


@pytest.mark.parametrize(("choice", "passed_on"), [(None, "1"), ("auto", "1"), ("0", "0")])
def test_a_wheel_without_kernels_must_be_asked_for(tool, monkeypatch, choice, passed_on):
    monkeypatch.delenv("KVSWAP_CUDA", raising=False)
    if choice:
        monkeypatch.setenv("KVSWAP_CUDA", choice)
    assert tool.build_variables()["KVSWAP_CUDA"] == passed_on


def test_where_glibc_cannot_wait_by_the_steady_clock_waits_are_as_long(tmp_path):
    (tmp_path / "old.cpp").write_text(
        "#include <dlfcn.h>\n#define dlsym(handle, name) static_cast<void*>(nullptr)\n"
        f'#include "{MANYLINUX}/missing.cpp"\n'
        "pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;\n"
        "pthread_cond_t condition = PTHREAD_COND_INITIALIZER;\n"
        'extern "C" int wait(clockid_t clock, time_t seconds, long nanoseconds) {\n'
        "  const timespec until{seconds, nanoseconds};\n"
        "  pthread_mutex_lock(&mutex);\n"
        "  const int result = pthread_cond_clockwait(&condition, &mutex, clock, &until);\n"
        "  pthread_mutex_unlock(&mutex);\n"
        "  return result;\n"
        "}\n"
    )
    options = ["-std=c++17", "-shared", "-fPIC", "-Wl,-Bsymbolic"]  # or else it is glibc that waits
    run("g++", *options, "old.cpp", "-o", "old.so", folder=tmp_path)
    wait = ctypes.CDLL(str(tmp_path / "old.so")).wait
    wait.argtypes = [ctypes.c_int, ctypes.c_long, ctypes.c_long]

    def is_wrong() -> bool:
        seconds, _ = divmod(time.clock_gettime_ns(time.CLOCK_MONOTONIC), 1_000_000_000)
        for nanoseconds in (0, 999_999_999):  # one of them is carried
            if wait(time.CLOCK_MONOTONIC, seconds - 5, nanoseconds) != errno.ETIMEDOUT:
                return True
        until = time.clock_gettime_ns(time.CLOCK_MONOTONIC) + 100_000_000
        result = wait(time.CLOCK_MONOTONIC, *divmod(until, 1_000_000_000))
        left = until - time.clock_gettime_ns(time.CLOCK_MONOTONIC)
        return result != errno.ETIMEDOUT or left > 1_000_000  # the clocks differ a little in rate

    assert in_child(is_wrong) == 0  # which is ended if a wait has no end
