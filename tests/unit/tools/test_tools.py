"""The programs of tools/: a wheel works without the sources."""

import ast
import ctypes
import errno
import os
import runpy
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from processes import in_child

ROOT = Path(__file__).parents[3]
TESTS = ("ops/test_ops.py", "test_reference.py", "test_binary.py")  # what runs on the wheel


def run(*command: object, folder: Path, **variables: object) -> None:
    environment = {**os.environ, **{name: str(value) for name, value in variables.items()}}
    subprocess.run(list(map(str, command)), cwd=folder, env=environment, check=True)


def test_an_old_python_can_read_environment() -> None:
    ast.parse((ROOT / "tools" / "environment.py").read_text(), feature_version=(3, 6))


@pytest.mark.slow
def test_a_wheel_works_without_the_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSWAP_CUDA", "0")  # nvcc takes as long as all the rest
    tool = runpy.run_path(str(ROOT / "tools" / "build_wheel.py"))
    (wheel,) = tool["build_wheels"]([sys.executable], tmp_path / "dist")
    installed, folder = tmp_path / "installed", tmp_path / "tests"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    run(*pip, "--target", installed, wheel, folder=tmp_path)
    shutil.copytree(ROOT / "tests", folder / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("conftest.py", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
    for name in ("csrc", "build"):  # the simulated driver is compiled from one into the other
        (folder / name).symlink_to(ROOT / name)
    pytest_ = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "-m",
        "not gpu and not slow",
    ]
    run(*pytest_, *(f"tests/unit/{name}" for name in TESTS), folder=folder, PYTHONPATH=installed)


def test_waits_are_as_long_on_an_old_glibc(tmp_path: Path) -> None:
    """One that cannot wait by the steady clock: a wheel then waits by the wall clock."""
    (tmp_path / "old.cpp").write_text(
        "#include <dlfcn.h>\n#define dlsym(handle, name) static_cast<void*>(nullptr)\n"
        f'#include "{ROOT}/tools/manylinux/missing.cpp"\n'
        "pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;\n"
        "pthread_cond_t condition = PTHREAD_COND_INITIALIZER;\n"
        'extern "C" int wait(time_t seconds, long nanoseconds) {\n'
        "  const timespec until{seconds, nanoseconds};\n"
        "  pthread_mutex_lock(&mutex);\n"
        "  return pthread_cond_clockwait(&condition, &mutex, CLOCK_MONOTONIC, &until);\n"
        "}\n"
    )
    options = ["-std=c++17", "-shared", "-fPIC", "-Wl,-Bsymbolic"]  # or else it is glibc that waits
    run("g++", *options, "old.cpp", "-o", "old.so", folder=tmp_path)
    wait = ctypes.CDLL(str(tmp_path / "old.so")).wait
    wait.argtypes = [ctypes.c_long, ctypes.c_long]

    def is_wrong(ahead: int) -> bool:
        until = time.monotonic_ns() + ahead
        result = wait(*divmod(until, 1_000_000_000))
        left = until - time.monotonic_ns()
        return result != errno.ETIMEDOUT or left > 1_000_000  # the clocks differ a little in rate

    for ahead in (-5_000_000_000, 100_000_000, 999_999_999):
        assert in_child(lambda: is_wrong(ahead)) == 0  # noqa: B023  which is ended if a wait has no end
