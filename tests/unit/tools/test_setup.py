"""setup.py: which tools and flags it chooses, and its errors when it cannot build."""

import ctypes
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from tempfile import mkdtemp
from types import ModuleType

import pytest
from expecttest import assert_expected_inline

from torch_kvswap._native.loader import native

ROOT = Path(__file__).parents[3]
SHOW_ALL = "-fvisibility=default"
LIBRARY = Path(native.__file__).name


@pytest.fixture
def setup(monkeypatch) -> ModuleType:
    for name in ("KVSWAP_CUDA", "CUDA_HOME", "CUDA_PATH", "CXX", "TORCH_CUDA_ARCH_LIST"):
        monkeypatch.delenv(name, raising=False)
    spec = importlib.util.spec_from_file_location("kvswap_setup", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make_program(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(["#!/bin/sh", *lines]))
    path.chmod(0o755)
    return path


def make_cuda(home: Path, version: str) -> Path:
    """A folder that looks like CUDA. Its nvcc can say its version and where it is, and compiles a
    source to what it reads there."""
    (home / "bin").mkdir(parents=True)
    make_program(
        home / "bin" / "nvcc",
        f'if [ "$1" = --version ]; then echo "release {version}, V{version}.1"; exit; fi',
        f'if [ "$1" = --dryrun ]; then echo "#$ TOP={home}" >&2; exit; fi',
        'while [ $# -gt 3 ]; do [ "$1" = -MF ] && depfile=$2; shift; done',
        'cp "$1" "$3" && echo "image: $1 csrc/a.h" >"$depfile"',
    )
    (home / "include").mkdir()
    (home / "include" / "cuda_runtime.h").touch()
    return home


def test_a_cuda_that_is_too_old_or_incomplete_is_passed_over(setup, monkeypatch, tmp_path):
    old, new = make_cuda(tmp_path / "old", "11.8"), make_cuda(tmp_path / "new", "12.4")
    without_headers = make_cuda(tmp_path / "without_headers", "12.8")
    (without_headers / "include" / "cuda_runtime.h").unlink()
    monkeypatch.setattr(setup, "cuda_homes", lambda: iter([old, without_headers, new]))
    assert setup.find_cuda() == (new / "bin" / "nvcc", (12, 4))


def test_kvswap_cuda_says_what_happens_without_nvcc(setup, monkeypatch, capsys):
    monkeypatch.setattr(setup, "cuda_homes", lambda: iter([Path("/nowhere"), Path("/or/here")]))
    assert setup.find_cuda() is None
    assert_expected_inline(
        capsys.readouterr().out,
        """\
torch_kvswap: the kernels are left out: no CUDA 12.0 or later is in /nowhere, /or/here
""",
    )
    monkeypatch.setenv("KVSWAP_CUDA", "1")
    with pytest.raises(SystemExit) as stop:
        setup.find_cuda()
    assert_expected_inline(
        str(stop.value),
        """torch_kvswap: KVSWAP_CUDA is 1, but no CUDA 12.0 or later is in /nowhere, /or/here. Name its folder in CUDA_HOME, or set KVSWAP_CUDA=0 to leave the kernels out.""",
    )


def test_kvswap_cuda_0_looks_for_no_nvcc_and_other_values_are_refused(setup, monkeypatch):
    monkeypatch.setattr(setup, "cuda_homes", lambda: pytest.fail("looked for nvcc"))
    monkeypatch.setenv("KVSWAP_CUDA", "0")
    assert setup.find_cuda() is None
    monkeypatch.setenv("KVSWAP_CUDA", "yes")
    with pytest.raises(SystemExit, match="KVSWAP_CUDA is 'yes'; it can be auto, 1 or 0"):
        setup.find_cuda()


def test_a_torch_that_is_too_old_is_refused(setup, monkeypatch):
    monkeypatch.setattr(setup.importlib.metadata, "version", lambda name: "2.10.1+cu126")
    with pytest.raises(SystemExit, match=r"too old: 2\.11 or later is needed"):
        setup.find_torch()


class Checkout:
    """A checkout with two sources, a header and a kernel, and a torch and a nanobind of its own.

    Its folder is one that a shell and ninja would read otherwise without quotes.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.site = folder / "a $checkout: 'small'", folder / "site"
        self.library = self.folder / "torch_kvswap" / LIBRARY
        for name in ("setup.py", "csrc/embed.S"):
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, self.folder / name)
        self.write("csrc/exports.map", "{ global: kvswap_*; };")
        self.write("csrc/a.h", "#define A 1")
        self.write("csrc/a.cpp", '#include "a.h"\nextern "C" int kvswap_a() { return A; }')
        self.write("csrc/b/b.cpp", '#include <torch.h>\nextern "C" int kvswap_b() { return 2; }')
        self.write("csrc/b/kernel.cu", "machine code")
        (self.site / "torch" / "include").mkdir(parents=True)
        (self.site / "torch" / "include" / "torch.h").touch()
        (self.site / "torch" / "__init__.py").touch()
        (self.site / "torch" / "lib").mkdir()
        (self.site / "torch" / "lib" / "libtorch_cpu.so").write_text("INPUT(-lc)")  # for the linker
        self.set_torch_version("2.12.0")
        (self.site / "nanobind" / "src").mkdir(parents=True)
        (self.site / "nanobind" / "src" / "nb_combined.cpp").touch()
        self.set_nanobind_version("3.1.0")

    def write(self, name: str, text: str) -> None:
        (self.folder / name).parent.mkdir(exist_ok=True)
        (self.folder / name).write_text(text)

    def set_torch_version(self, version: str) -> None:
        metadata = self.site / "torch-2.12.0.dist-info" / "METADATA"
        metadata.parent.mkdir(exist_ok=True)
        metadata.write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")

    def set_nanobind_version(self, version: str) -> None:
        (self.site / "nanobind" / "__init__.py").write_text(f"__version__ = {version!r}")

    def start_build(self, **environment: object) -> subprocess.Popen[str]:
        settings = {"KVSWAP_CUDA": 0, "CXX": "g++", "CXXFLAGS": SHOW_ALL, "LDFLAGS": ""}
        settings |= {"MAX_JOBS": 2, "PYTHONPATH": self.site, **environment}
        return subprocess.Popen(
            [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"],
            cwd=self.folder,
            env={**os.environ, **{name: str(value) for name, value in settings.items()}},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def build(self, **environment: object) -> list[str]:
        """Build, which must succeed. Returns what was compiled."""
        process = self.start_build(**environment)
        output, errors = process.communicate()
        assert process.returncode == 0, output + errors
        return compiled(output)

    def load(self) -> ctypes.CDLL:
        # From a copy of a new name: the loader takes what it has under an old one.
        copy = Path(mkdtemp(dir=self.folder), "library.so")
        return ctypes.CDLL(shutil.copy(self.library, copy))


def compiled(output: str) -> list[str]:
    return sorted(re.findall(r"compiling (.+)", output))


@pytest.fixture
def checkout(tmp_path) -> Checkout:
    return Checkout(tmp_path)


@pytest.mark.slow
def test_only_what_a_change_touches_is_compiled_again(checkout):
    everything = ["csrc/a.cpp", "csrc/b/b.cpp", "nanobind"]
    assert checkout.build() == everything
    assert checkout.build() == []
    checkout.write("csrc/b/b.cpp", '#include <torch.h>\nextern "C" int kvswap_b() { return 3; }')
    assert checkout.build() == ["csrc/b/b.cpp"]
    assert checkout.load().kvswap_b() == 3
    checkout.write("csrc/a.h", "#define A 4")
    assert checkout.build() == ["csrc/a.cpp"]
    assert checkout.load().kvswap_a() == 4
    (checkout.site / "torch" / "include" / "torch.h").touch()
    assert checkout.build() == ["csrc/b/b.cpp"]
    assert checkout.build(CXXFLAGS="-O1") == everything
    checkout.set_torch_version("2.13.0")
    assert checkout.build(CXXFLAGS="-O1") == everything[:2]
    checkout.set_nanobind_version("3.2.0")
    assert checkout.build(CXXFLAGS="-O1") == everything
    assert checkout.build(CXXFLAGS="-O1") == []


@pytest.mark.slow
def test_kernels_are_bytes_of_the_library(checkout, tmp_path):
    home = make_cuda(tmp_path / "cuda home", "12.8")
    checkout.write("csrc/a.cpp", 'extern "C" int kvswap_a() { return KVSWAP_WITH_KERNELS; }')
    with_kernels = {"KVSWAP_CUDA": 1, "CUDA_HOME": home}
    sources = ["csrc/a.cpp", "csrc/b/b.cpp", "csrc/b/kernel.cu", "nanobind"]
    assert checkout.build(**with_kernels) == sources
    assert checkout.load().kvswap_a() == 12080
    image = (ctypes.c_char * 12).in_dll(checkout.load(), "kvswap_kernel_image")
    assert image.raw == b"machine code"
    assert ctypes.addressof(image) % 64 == 0
    checkout.write("csrc/b/kernel.cu", "faster codes")
    assert checkout.build(**with_kernels) == ["csrc/b/kernel.cu"]
    image = (ctypes.c_char * 12).in_dll(checkout.load(), "kvswap_kernel_image")
    assert image.raw == b"faster codes"
    checkout.write("csrc/a.h", "#define A 5")  # which make_cuda's nvcc says it has read
    assert checkout.build(**with_kernels) == ["csrc/b/kernel.cu"]


def test_a_failing_compiler_is_shown_with_its_command_and_what_it_said(checkout):
    checkout.write("csrc/a.cpp", "#error broken")
    process = checkout.start_build()
    output, errors = process.communicate()
    assert process.returncode == 1
    assert re.search(r"^g\+\+ .* -c csrc/a\.cpp -o ", output, re.MULTILINE)
    assert "error: #error broken" in output
    assert_expected_inline(
        errors,
        """\
torch_kvswap: the build failed. Above is the command that failed, and what it said.
""",
    )
    checkout.write("csrc/a.cpp", "")
    assert "csrc/a.cpp" in checkout.build()


@pytest.fixture(scope="module")
def sdist(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("sdist")
    command = [sys.executable, "setup.py", "--quiet", "sdist", "--dist-dir", folder]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    (sdist,) = folder.iterdir()
    return sdist


@pytest.mark.slow
def test_the_sdist_has_all_that_a_build_needs_and_the_license(sdist):
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    native = {str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob("*.*")}
    assert {"LICENSE", "CHANGELOG.md", "README.md", "setup.py", "pyproject.toml"} <= names
    assert native <= names
