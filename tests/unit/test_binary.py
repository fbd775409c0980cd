"""The native library as a file: its dependencies, and that it works with every CUDA release."""

import ctypes
import os
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import simulated_driver
import torch
from expecttest import assert_expected_inline

import torch_kvswap as kvs
from torch_kvswap._native import loader
from torch_kvswap._native.loader import native

ROOT = Path(__file__).parents[2]
PYTHON = ".".join(map(str, sys.version_info[:2]))
# What every Linux with torch has. In particular no libcuda, libcudart, libtorch_cuda, libc10_cuda
# and libtorch_python: those are not there for every torch or not of one version.
LIBRARIES = re.compile(
    r"libtorch_cpu\.so|libstdc\+\+\.so\.6|libgcc_s\.so\.1|lib(c|m)\.so\.6|libdl\.so\.2|"
    r"librt\.so\.1|libpthread\.so\.0|ld-linux-[\w-]+\.so\.\d"
)
# torch's stable C functions, Python's functions, versioned symbols of the C and C++ runtimes, weak
# hooks of the linker and of transactional memory. std::exception_ptr is in libtorch_cpu, too, where
# the linker finds it without a version.
SYMBOLS = re.compile(
    r"(aoti_torch|torch)_\w+|_?Py\w+|[^@]+@(GLIBC|GLIBCXX|CXXABI|GCC)_[\d.]+( \(\d+\))?|"
    r"_ZNSt15__exception_ptr\w+|_ITM_\w+|_ZGTt\w+|__cxa_pure_virtual|__gmon_start__"
)
CUDA_HEADERS = {
    "12.4": "nvidia-cuda-runtime-cu12==12.4.*",
    "12.8": "nvidia-cuda-runtime-cu12==12.8.*",
    "13": "nvidia-cuda-runtime==13.*",
}


def readelf(option: str) -> list[str]:
    if shutil.which("readelf") is None:
        pytest.skip("no readelf, which comes with g++")
    command = ["readelf", "--wide", option, native.__file__]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def symbols(defined: bool) -> list[str]:
    """Names of the dynamic symbols, with their versions."""
    columns = [line.split(maxsplit=7) for line in readelf("--dyn-syms")]
    rows = [row for row in columns if len(row) == 8 and row[0][:-1].isdigit()]
    return [row[7] for row in rows if (row[6] != "UND") == defined]


def test_it_needs_only_libraries_that_every_torch_has():
    needed = [re.findall(r"\[(.*)\]", line)[0] for line in readelf("--dynamic") if "NEEDED" in line]
    assert "libtorch_cpu.so" in needed
    assert [name for name in needed if not LIBRARIES.fullmatch(name)] == []


def test_it_needs_only_symbols_that_every_torch_has():
    undefined = symbols(defined=False)
    assert any(name.startswith("aoti_torch_") for name in undefined)
    assert [name for name in undefined if not SYMBOLS.fullmatch(name)] == []


def test_it_shows_nothing_but_its_module():
    assert symbols(defined=True) == ["PyInit__C"]


def test_an_ops_exception_is_no_longer_in_flight():
    # torch catches it. A library with a C++ runtime of its own would count it there and here: -1, -2.
    in_flight = ctypes.CDLL("libstdc++.so.6")._ZSt19uncaught_exceptionsv
    one, two = torch.zeros(1, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="dst_ptrs has length 2"):
            kvs.swap_blocks_batch(one, two, one)
    assert in_flight() == 0


@pytest.mark.skipif(
    torch.version.cuda is not None, reason="the simulated driver needs a PyTorch without CUDA"
)
def test_importing_does_not_touch_cuda():
    # With the simulated driver a driver can be found on every machine; the last line, a control, uses it.
    code = """
import pathlib, torch
def drivers(): return "libcuda.so" in pathlib.Path("/proc/self/maps").read_text()
before = drivers()
import torch_kvswap
from torch_kvswap._native.loader import native
pool = torch_kvswap.HostPool(torch_kvswap.PagedLayout([torch.zeros(2, 8)]), 4)
print(drivers() != before, torch.cuda.is_initialized())
native.driver_version()
print(drivers() != before, torch.cuda.is_initialized())
"""
    environment = {**os.environ, "LD_LIBRARY_PATH": str(simulated_driver.build())}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["False False", "True False"]


def test_a_python_without_gil_is_refused(monkeypatch):
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: False, raising=False)
    with pytest.raises(ImportError, match=r"^torch_kvswap needs Python's GIL, .* set PYTHON_GIL=1"):
        loader.load()


@pytest.fixture
def folder(monkeypatch, tmp_path) -> Path:
    """Where the loader looks for the library: an empty folder."""
    monkeypatch.setattr(loader, "FOLDER", tmp_path)
    monkeypatch.setattr(kvs, "__path__", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "torch_kvswap._C")
    return tmp_path


def test_a_missing_library_names_the_remedy(folder):
    with pytest.raises(ImportError) as error:
        loader.load()
    assert_expected_inline(
        str(error.value).replace(str(folder), "FOLDER").replace(PYTHON, "3.x"),
        """torch_kvswap's native library is missing: FOLDER has none for Python 3.x. Build it (`make build` in a checkout, else `pip install --no-build-isolation .`).""",
    )


def test_a_hidden_installation_is_named(folder, monkeypatch):
    hidden = folder / "site" / folder.name
    hidden.mkdir(parents=True)
    (hidden / "_C.abi3.so").touch()
    monkeypatch.syspath_prepend(folder / "site")
    with pytest.raises(ImportError, match=f"hides the torch_kvswap in {folder}/site: start Python"):
        loader.load()


def test_a_library_of_another_python_is_named(folder):
    (folder / "_C.cpython-39-x86_64-linux-gnu.so").touch()
    with pytest.raises(
        ImportError, match=r"; _C\.cpython-39-\S+\.so is for another Python\. Build"
    ):
        loader.load()


def test_an_unloadable_library_names_torch_and_reason(folder):
    library = folder / Path(native.__file__).name
    library.write_text("no library")
    with pytest.raises(
        ImportError, match=rf"torch \S+ cannot load .* {library}: .*(ELF|too short)"
    ):
        loader.load()


def cuda_headers(version: str, folder: Path) -> Path:
    """The folder of cuda.h of a CUDA version, from the package registry; kept in build/."""
    kept = ROOT / "build" / "cuda_headers" / version
    if not kept.exists():
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--retries=1"]
        options = ["--timeout=15", "--only-binary=:all:", "--dest", folder, CUDA_HEADERS[version]]
        done = subprocess.run([*command, *options], capture_output=True, text=True)
        if done.returncode != 0:
            tell = pytest.fail if os.environ.get("CI") else pytest.skip
            tell(f"no CUDA {version} headers to be had: {done.stderr.strip().splitlines()[-1]}")
        (wheel,) = folder.glob("*.whl")
        archive = zipfile.ZipFile(wheel)
        headers = [name for name in archive.namelist() if "/include/" in name]
        archive.extractall(folder / "wheel", headers)
        kept.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(folder / "wheel", kept)
    return next(kept.rglob("cuda.h")).parent


def compile_check(name: str, include: Path, *options: str) -> None:
    cxx = shlex.split(os.environ.get("CXX", "g++"))
    command = [*cxx, "-std=c++17", "-fsyntax-only", "-Wall", "-Werror", *options]
    folders = ["-isystem", include, "-I", ROOT / "csrc"]
    source = ROOT / "tests" / "support" / name
    done = subprocess.run([*command, *folders, source], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("version", CUDA_HEADERS)
def test_driver_prototypes_agree_with_cudas_headers(version, tmp_path):
    compile_check("cuda_headers_check.cpp", cuda_headers(version, tmp_path))


def test_simulated_functions_agree_with_cudas_header(tmp_path):
    include = cuda_headers("12.8", tmp_path)  # the version that the simulated driver says it has
    support = ROOT / "tests" / "support"
    for source in sorted(support.glob("simulated_driver/simulation/*_calls.cpp")):
        compile_check(str(source.relative_to(support)), include, "-include", "cuda.h")
