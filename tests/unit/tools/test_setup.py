"""setup.py: which tools and flags it chooses, and its errors when it cannot build."""

import ctypes
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_bytes
from email.message import Message
from fcntl import LOCK_EX, flock
from pathlib import Path
from tempfile import mkdtemp
from types import ModuleType

import pytest
from expecttest import assert_expected_inline

import torch_kvswap as kvs
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


def test_torch_cuda_arch_list_is_respected(setup):
    assert setup.architectures((12, 4), "9.0a; 10.0+PTX") == [
        "-gencode=arch=compute_90a,code=sm_90a",
        "-gencode=arch=compute_100,code=sm_100",
        "-gencode=arch=compute_100,code=compute_100",
    ]
    with pytest.raises(SystemExit, match="has 'Hopper'; write such as"):
        setup.architectures((12, 4), "9.0 Hopper")


def test_a_cuda_that_is_too_old_or_incomplete_is_passed_over(setup, monkeypatch, tmp_path):
    old, new = make_cuda(tmp_path / "old", "11.8"), make_cuda(tmp_path / "new", "12.4")
    without_headers = make_cuda(tmp_path / "without_headers", "12.8")
    (without_headers / "include" / "cuda_runtime.h").unlink()
    monkeypatch.setattr(setup, "cuda_homes", lambda: iter([old, without_headers, new]))
    assert setup.find_cuda() == (new / "bin" / "nvcc", (12, 4))


def test_cuda_home_comes_before_all_others(setup, monkeypatch, tmp_path):
    for name in ("CUDA_PATH", "CUDA_HOME"):
        monkeypatch.setenv(name, str(make_cuda(tmp_path / name, "12.8")))
    assert setup.find_cuda().nvcc == tmp_path / "CUDA_HOME" / "bin" / "nvcc"


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


@pytest.mark.parametrize(
    ("module", "find", "said"),
    [
        (
            "torch",
            "find_torch",
            "python3 has no torch to build against. Install torch 2.11 or later, and build with --no-build-isolation, which lets the build see it.",
        ),
        (
            "ninja",
            "find_ninja",
            "python3 has no ninja, which runs the compilers. Install it: pip install 'ninja>=1.11'",
        ),
        (
            "nanobind",
            "find_nanobind",
            "python3 has no nanobind, which binds C++ to Python. Install it: pip install 'nanobind>=3.1'",
        ),
        ("c++", "find_cxx", "there is no C++ compiler no-such-compiler"),
    ],
)
def test_what_is_missing_is_named_with_the_way_out(setup, monkeypatch, module, find, said):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(setup, module, None, raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(SystemExit) as stop:
        getattr(setup, find)()
    assert said in str(stop.value).replace(sys.executable, "python3")


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
def test_a_library_that_is_up_to_date_is_left_alone_and_another_replaced(checkout):
    checkout.build()
    first, content = checkout.library.stat(), checkout.library.read_bytes()
    checkout.build()
    assert checkout.library.stat().st_ino == first.st_ino
    checkout.library.write_text("of another build")
    with checkout.library.open() as being_read:
        checkout.build()
        assert being_read.read() == "of another build"
    assert checkout.library.read_bytes() == content
    assert [path.name for path in checkout.library.parent.iterdir()] == [LIBRARY]


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


def test_a_failing_build_with_kernels_says_how_to_do_without(checkout, tmp_path):
    home = make_cuda(tmp_path / "cuda", "12.8")
    process = checkout.start_build(KVSWAP_CUDA=1, CUDA_HOME=home, CXX="g++ -no-such-option")
    _, errors = process.communicate()
    assert process.returncode == 1
    assert errors.endswith("what it said. KVSWAP_CUDA=0 leaves the kernels out.\n")


def build_twice_at_once(checkout: Checkout, **environment: object) -> list[str]:
    """What both together compiled."""
    builds = [checkout.start_build(**environment) for _ in range(2)]
    return sorted(source for build in builds for source in compiled(build.communicate()[0]))


@pytest.mark.slow
def test_of_two_builds_at_once_one_waits_and_has_nothing_to_do(checkout):
    assert build_twice_at_once(checkout) == ["csrc/a.cpp", "csrc/b/b.cpp", "nanobind"]
    assert checkout.load().kvswap_a() == 1
    assert checkout.build() == []


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--quiet"]
    command += ["--wheel-dir", folder, ROOT]
    with (ROOT / "build" / "wheel.lock").open("w") as lock:
        flock(lock, LOCK_EX)  # setuptools makes every wheel of a checkout in the same folder
        done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = folder.iterdir()
    return wheel


@pytest.fixture(scope="module")
def sdist(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("sdist")
    command = [sys.executable, "setup.py", "--quiet", "sdist", "--dist-dir", folder]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    (sdist,) = folder.iterdir()
    return sdist


def read_metadata(wheel: Path) -> Message:
    name = f"torch_kvswap-{kvs.__version__}.dist-info/METADATA"
    return message_from_bytes(zipfile.ZipFile(wheel).read(name))


@pytest.mark.slow
def test_pip_makes_one_wheel_for_every_torch_and_for_every_python_that_can_share_it(wheel):
    python = "cp{}{}".format(*sys.version_info)
    tags = "cp312-abi3" if sys.version_info >= (3, 12) else f"{python}-{python}"
    assert wheel.name.startswith(f"torch_kvswap-{kvs.__version__}-{tags}-linux_")
    names = zipfile.ZipFile(wheel).namelist()
    assert {f"torch_kvswap/{LIBRARY}", "torch_kvswap/py.typed"} <= set(names)
    assert not any(name.startswith(("tests/", "tools/")) for name in names)


@pytest.mark.slow
def test_the_wheel_says_its_version_its_license_and_what_it_is(wheel):
    metadata = read_metadata(wheel)
    assert metadata["Version"] == kvs.__version__
    assert (ROOT / "README.md").read_text().strip() in metadata.get_payload()
    assert metadata["License-Expression"] == "Apache-2.0"
    folder = f"torch_kvswap-{kvs.__version__}.dist-info/licenses"
    assert zipfile.ZipFile(wheel).read(f"{folder}/LICENSE") == (ROOT / "LICENSE").read_bytes()


@pytest.mark.slow
def test_the_sdist_has_all_that_a_build_needs_and_the_license(sdist):
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    native = {str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob("*.*")}
    assert {"LICENSE", "CHANGELOG.md", "README.md", "setup.py", "pyproject.toml"} <= names
    assert native <= names
