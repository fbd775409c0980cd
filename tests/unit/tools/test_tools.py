"""The programs of tools/, and what distributions have."""

import ast
import ctypes
import errno
import subprocess
import sys
import tarfile
import time
import zipfile
from pathlib import Path

import pytest
from processes import in_child

ROOT = Path(__file__).parents[3]


def run(*command: object, folder: Path) -> None:
    subprocess.run(list(map(str, command)), cwd=folder, check=True)


def test_an_old_python_can_read_environment() -> None:
    ast.parse((ROOT / "tools" / "environment.py").read_text(), feature_version=(3, 6))


@pytest.mark.slow
def test_distributions_have_all_files_and_work(tmp_path: Path) -> None:
    """The wheel of the library that is built here: to compile it again takes a minute."""
    setup = [sys.executable, "setup.py", "--quiet", "egg_info", "--egg-base", tmp_path]
    run(*setup, "sdist", "--dist-dir", tmp_path, folder=ROOT)
    run(*setup, "bdist_wheel", "--bdist-dir", tmp_path / "made", "-d", tmp_path, folder=ROOT)
    (sources,), (wheel,) = tmp_path.glob("*.tar.gz"), tmp_path.glob("*.whl")
    with tarfile.open(sources) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    package = [*(ROOT / "torch_kvswap").rglob("*.py"), ROOT / "torch_kvswap" / "_C.pyi"]
    package = [str(path.relative_to(ROOT)) for path in (*package, ROOT / "torch_kvswap/py.typed")]
    native = [path for path in (ROOT / "csrc").rglob("*") if path.is_file()]
    assert names >= {*package, *(str(path.relative_to(ROOT)) for path in native), "setup.py"}
    with zipfile.ZipFile(wheel) as built:
        built.extractall(tmp_path / "installed")
        assert {*built.namelist()} >= {*package}
    script = f"""
import torch
import torch_kvswap as kvs
assert kvs.__file__.startswith({str(tmp_path)!r}), kvs.__file__
cache = torch.arange(8.0)[:, None]
layout = kvs.PagedLayout([cache])
with kvs.OffloadHandler(layout, kvs.HostPool(layout, 2)) as handler:
    handler.store(gpu_block_ids=[5], page_ids=[1]).synchronize()
    handler.load(page_ids=[1], gpu_block_ids=[2]).synchronize()
assert cache[2] == 5
"""
    run(sys.executable, "-c", script, folder=tmp_path / "installed")


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
