"""setup.py: what it finds, which flags it chooses, and what it says when it cannot build."""

import importlib.util
import shlex
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_bytes
from email.message import Message
from pathlib import Path
from types import ModuleType

import pytest
from expecttest import assert_expected_inline
from setuptools import Distribution

import torch_kvswap as kvs

ROOT = Path(__file__).parents[3]


@pytest.fixture
def setup(monkeypatch) -> ModuleType:
    for name in ("KVSWAP_CUDA", "CUDA_HOME", "CUDA_PATH", "CXX", "TORCH_CUDA_ARCH_LIST"):
        monkeypatch.delenv(name, raising=False)
    spec = importlib.util.spec_from_file_location("kvswap_setup", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make_cuda(home: Path, version: str) -> Path:
    """A folder that looks like CUDA; its nvcc can say its version and where it is."""
    nvcc = home / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text(
        f'#!/bin/sh\nif [ "$1" = --version ]; then echo "release {version}, V{version}.1"\n'
        f'else echo "#$ TOP={home}" >&2; fi\n'
    )
    nvcc.chmod(0o755)
    (home / "include").mkdir()
    (home / "include" / "cuda_runtime.h").touch()
    return home


def test_the_newest_nvcc_also_compiles_for_blackwell(setup):
    old = ["-gencode=arch=compute_80,code=sm_80", "-gencode=arch=compute_90,code=sm_90"]
    assert setup.architectures((12, 4)) == [*old, "-gencode=arch=compute_90,code=compute_90"]
    new = ["-gencode=arch=compute_100,code=sm_100", "-gencode=arch=compute_100,code=compute_100"]
    assert setup.architectures((12, 8)) == [*old, *new]
    assert setup.architectures((13, 0)) == [*old, *new]


def test_torch_cuda_arch_list_is_respected(setup):
    assert setup.architectures((12, 4), "9.0a; 10.0+PTX") == [
        "-gencode=arch=compute_90a,code=sm_90a",
        "-gencode=arch=compute_100,code=sm_100",
        "-gencode=arch=compute_100,code=compute_100",
    ]
    with pytest.raises(SystemExit, match="has 'Hopper'; write such as"):
        setup.architectures((12, 4), "9.0 Hopper")


def test_cuda_home_comes_before_all_others(setup, monkeypatch, tmp_path):
    first, second = make_cuda(tmp_path / "first", "12.8"), make_cuda(tmp_path / "second", "13.0")
    monkeypatch.setenv("CUDA_HOME", str(first))
    monkeypatch.setenv("CUDA_PATH", str(second))
    assert setup.find_cuda() == (first / "bin" / "nvcc", (12, 8))


def test_an_nvcc_on_the_path_that_is_a_script_says_where_the_real_one_is(
    setup, monkeypatch, tmp_path
):
    home = make_cuda(tmp_path / "real", "13.0")
    wrapper = tmp_path / "bin" / "nvcc"
    wrapper.parent.mkdir()
    wrapper.write_text(f'#!/bin/sh\nexec {shlex.quote(str(home))}/bin/nvcc "$@"\n')
    wrapper.chmod(0o755)
    monkeypatch.setenv("PATH", f"{wrapper.parent}:/usr/bin:/bin")
    assert list(setup.cuda_homes())[-1] == home


def test_a_cuda_that_is_too_old_or_incomplete_is_passed_over(setup, monkeypatch, tmp_path):
    old, new = make_cuda(tmp_path / "old", "11.8"), make_cuda(tmp_path / "new", "12.4")
    without_headers = make_cuda(tmp_path / "without_headers", "12.8")
    (without_headers / "include" / "cuda_runtime.h").unlink()
    monkeypatch.setattr(setup, "cuda_homes", lambda: iter([old, without_headers, new]))
    assert setup.find_cuda().nvcc == new / "bin" / "nvcc"


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
        """torch_kvswap: KVSWAP_CUDA is 1, but no CUDA 12.0 or later is in /nowhere, /or/here. Name its folder in CUDA_HOME.""",
    )


def test_kvswap_cuda_0_looks_for_no_nvcc_and_other_values_are_refused(setup, monkeypatch):
    monkeypatch.setattr(setup, "cuda_homes", lambda: pytest.fail("looked for nvcc"))
    monkeypatch.setenv("KVSWAP_CUDA", "0")
    assert setup.find_cuda() is None
    monkeypatch.setenv("KVSWAP_CUDA", "yes")
    with pytest.raises(SystemExit, match="KVSWAP_CUDA is 'yes'; it can be auto, 1 or 0"):
        setup.find_cuda()


def test_a_missing_torch_is_named_with_the_way_out(setup, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit) as stop:
        setup.find_torch()
    assert_expected_inline(
        str(stop.value).replace(sys.executable, "python3"),
        """torch_kvswap: python3 has no torch to build against. Install torch 2.11 or later, and build with --no-build-isolation, which lets the build see it.""",
    )


def test_a_torch_that_is_too_old_is_refused(setup, monkeypatch):
    monkeypatch.setattr(setup.importlib.metadata, "version", lambda name: "2.10.1+cu126")
    with pytest.raises(SystemExit) as stop:
        setup.find_torch()
    assert_expected_inline(
        str(stop.value).replace(sys.executable, "python3"),
        """torch_kvswap: torch 2.10.1+cu126 of python3 is too old: 2.11 or later is needed.""",
    )


def test_a_missing_compiler_is_named(setup, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(SystemExit, match=r"there is no C\+\+ compiler no-such-compiler"):
        setup.find_cxx()


def test_a_failing_command_is_shown_with_what_it_printed(setup, capsys):
    with pytest.raises(SystemExit, match="status 3 from: sh -c"):
        setup.call(["sh", "-c", "echo broken; exit 3"])
    assert capsys.readouterr().out == "broken\n"


def test_an_object_is_made_again_when_source_header_or_flags_change(setup, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    Path("csrc").mkdir()
    Path("csrc/a.cpp").write_text("1")
    Path("csrc/a.h").write_text("1")
    made = []

    def compile_it(command: list[str], advice: str) -> None:
        made.append(command)
        Path(command[-1]).touch()

    monkeypatch.setattr(setup, "call", compile_it)
    build = setup.BuildLibrary(Distribution())
    build.build_temp = "build"
    for change in (None, ("csrc/a.cpp", "2"), ("csrc/a.h", "2")):
        if change:
            Path(change[0]).write_text(change[1])
        before = len(made)
        product = build.compile(Path("csrc/a.cpp"), ["g++"])
        assert product.exists()
        assert build.compile(Path("csrc/a.cpp"), ["g++"]) == product
        assert len(made) == before + 1
    build.compile(Path("csrc/a.cpp"), ["g++", "-DKVSWAP_WITH_KERNELS"])
    assert len(made) == 4


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--quiet"]
    done = subprocess.run([*command, "--wheel-dir", folder, ROOT], capture_output=True, text=True)
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
def test_pip_makes_one_wheel_for_every_python_and_torch(wheel):
    assert wheel.name.startswith(f"torch_kvswap-{kvs.__version__}-cp310-abi3-linux_")
    names = zipfile.ZipFile(wheel).namelist()
    assert {"torch_kvswap/_C.abi3.so", "torch_kvswap/py.typed"} <= set(names)
    assert not any(name.startswith(("tests/", "tools/")) for name in names)


@pytest.mark.slow
def test_the_version_of_the_package_is_that_of_its_metadata(wheel):
    assert read_metadata(wheel)["Version"] == kvs.__version__


@pytest.mark.slow
def test_the_wheel_has_the_license_and_says_whose_it_is(wheel):
    metadata = read_metadata(wheel)
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["License-File"] == "LICENSE"
    assert metadata["Author"] == "the torch_kvswap authors"
    folder = f"torch_kvswap-{kvs.__version__}.dist-info/licenses"
    assert zipfile.ZipFile(wheel).read(f"{folder}/LICENSE") == (ROOT / "LICENSE").read_bytes()


@pytest.mark.slow
def test_the_wheel_describes_itself_with_the_readme_and_the_changelog(wheel):
    description = read_metadata(wheel).get_payload()
    for name in ("README.md", "CHANGELOG.md"):
        assert (ROOT / name).read_text().strip() in description


@pytest.mark.slow
def test_the_sdist_has_all_that_a_build_needs_and_the_license(sdist):
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    native = {str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob("*.*")}
    assert {"LICENSE", "CHANGELOG.md", "README.md", "setup.py", "pyproject.toml"} <= names
    assert native <= names
