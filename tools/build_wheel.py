"""Builds wheels that run on every Linux with glibc 2.28 or later, and puts them into dist/.

    python tools/build_wheel.py [PYTHON...]

One for each PYTHON, or for the one that runs this. That one has torch and all that the build needs,
also for the others, which need only their headers. The wheels are made of a source distribution,
with the compiler and libraries of this machine. What is newer there than glibc 2.28 is replaced:
manylinux/ has what for. With kernels, which need nvcc, unless KVSWAP_CUDA is 0.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parent.parent
MANYLINUX = ROOT / "tools" / "manylinux"
PLATFORM = f"manylinux_2_28_{platform.machine()}"
NEWEST_VERSIONS = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11)}  # of PLATFORM
BUILD_PACKAGES = ("nanobind", "ninja", "setuptools", "torch")


def run(*command: object, folder: Path = ROOT, **variables: str) -> str:
    """Runs a command that must succeed, and returns what it wrote."""
    words = [str(word) for word in command]
    done = subprocess.run(
        words,
        cwd=folder,
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode != 0:
        raise SystemExit(f"{done.stdout}torch_kvswap: failed: {shlex.join(words)}")
    return done.stdout


def find_python(name: str) -> Path:
    path = shutil.which(name)
    if path is None:
        raise SystemExit(f"torch_kvswap: there is no {name} to build a wheel for.")
    return Path(path).absolute()  # not resolved: a virtual environment's is a link


def unpack_sources(folder: Path) -> Path:
    """Unpacks a source distribution, and adds the sources that only wheels need."""
    egg_info = ("egg_info", "--egg-base", folder)
    run(sys.executable, "setup.py", "--quiet", *egg_info, "sdist", "--dist-dir", folder)
    (sdist,) = folder.glob("*.tar.gz")
    run("tar", "--extract", "--file", sdist, "--directory", folder)
    sources = folder / sdist.name.removesuffix(".tar.gz")
    shutil.copytree(MANYLINUX, sources / "csrc" / "manylinux")
    return sources


def build_variables() -> dict[str, str]:
    """Environment variables of the build."""
    choice = os.environ.get("KVSWAP_CUDA") or "auto"
    places = {str(importlib.metadata.distribution(name).locate_file("")) for name in BUILD_PACKAGES}
    # Libraries that are part of glibc's libc.so.6 since 2.34 are named for older ones.
    settings = {
        "CXXFLAGS": "-include csrc/manylinux/old_versions.h",
        "LDFLAGS": "-Wl,--no-as-needed -l:libdl.so.2 -l:libpthread.so.0",
    }
    return {
        "KVSWAP_CUDA": "1" if choice == "auto" else choice,
        "PATH": os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]]),
        "PYTHONPATH": os.pathsep.join(sorted(places)),
        **{name: f"{flags} {os.environ.get(name, '')}" for name, flags in settings.items()},
    }


def too_new(library: Path) -> list[str]:
    """The functions that the library needs in versions that PLATFORM does not have."""
    needed = run("nm", "--dynamic", "--undefined-only", "--with-symbol-versions", library)
    return [
        f"{name}@{kind}_{version}"
        for name, kind, version in re.findall(r"(\S+)@(GLIBC|GLIBCXX|CXXABI)_([\d.]+)", needed)
        if tuple(map(int, version.split("."))) > NEWEST_VERSIONS[kind]
    ]


def check_versions(wheel: Path, folder: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (library,) = [name for name in archive.namelist() if name.endswith(".so")]
        names = too_new(Path(archive.extract(library, folder)))
    if names:
        raise SystemExit(
            f"torch_kvswap: {library} does not run with glibc 2.28: it needs {', '.join(names)}. "
            f"Name older versions in {MANYLINUX}/old_versions.h, or define what is missing in "
            "missing.cpp beside it."
        )


def build(python: Path, sources: Path, folder: Path) -> Path:
    """Builds the wheel for `python`. Returns its path in `folder`."""
    built, repaired = folder / "built", folder / "repaired"
    command = ["setup.py", "bdist_wheel", "--dist-dir", built]
    run(python, *command, folder=sources, **build_variables())
    (wheel,) = built.iterdir()
    check_versions(wheel, folder)
    auditwheel = [sys.executable, "-m", "auditwheel", "repair", "--plat", PLATFORM, "--only-plat"]
    options = ["--exclude", "libtorch_cpu.so", "--patcher", "none", "--wheel-dir", repaired]
    run(*auditwheel, *options, wheel)
    (wheel,) = repaired.iterdir()
    return wheel


def build_wheels(pythons: Iterable[str], destination: Path) -> list[Path]:
    """Builds all wheels, then moves them to `destination`. Returns their paths there."""
    found = [find_python(name) for name in pythons]
    (ROOT / "build").mkdir(exist_ok=True)
    with TemporaryDirectory(prefix="wheel-", dir=ROOT / "build") as name:
        folder = Path(name)
        sources = unpack_sources(folder)
        wheels = []
        for number, python in enumerate(found):
            print(f"torch_kvswap: building a wheel for {python}", file=sys.stderr, flush=True)
            wheels.append(build(python, sources, folder / str(number)))
        destination.mkdir(exist_ok=True)
        return [wheel.replace(destination / wheel.name) for wheel in wheels]


if __name__ == "__main__":
    for wheel in build_wheels(sys.argv[1:] or [sys.executable], ROOT / "dist"):
        print(f"torch_kvswap: {wheel} has {wheel.stat().st_size / 1e6:.2f} MB")
