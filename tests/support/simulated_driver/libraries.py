"""Builds the simulated driver's libraries when their sources have changed."""

from __future__ import annotations

import os
import shlex
import subprocess
from functools import cache
from pathlib import Path

from native_builds import build_once

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
ENCODING = ROOT / "csrc" / "encoding"
# They stand in for the kernels that do the same.
ON_CPU = [ENCODING / "codec.cpp", ENCODING / "checksum.cpp"]
# Files in the order in which they are made, with their folders of sources and options of their own.
# The libraries that a file is linked with are beside it.
SOURCES = {
    "libsimulation.so": ("simulation", [*map(str, ON_CPU)]),
    "liballocations.so": ("liballocations", []),
    "libtorch_cuda.so": ("libtorch_cuda", []),
    "libcuda.so.1": ("libcuda", ["-L{made}", "-l:libsimulation.so", "-Wl,-rpath,$ORIGIN"]),
}
COMMAND = ["g++", "-std=c++17", "-O1", "-Wall", "-Wextra", "-shared", "-fPIC", "-pthread"]
COMMAND += [f"-I{ROOT / 'csrc'}"]
COMMAND += shlex.split(os.environ.get("CXXFLAGS", ""))  # as the library is compiled


@cache
def build() -> Path:
    """The folder of the libraries of the simulated driver, made by the first that asks."""
    folders = {folder for folder, _ in SOURCES.values()}
    files = sorted(path for folder in folders for path in (HERE / folder).iterdir())
    files += [*ENCODING.glob("*.h"), *ON_CPU, *(ROOT / "csrc" / "kernels").glob("*.h")]
    return build_once("simulated-driver", files, f"{COMMAND} {SOURCES}", _compile)


def _compile(folder: Path) -> None:
    for name, (sources, options) in SOURCES.items():
        paths = [str(path) for path in sorted((HERE / sources).glob("*.cpp"))]
        linked = [option.format(made=folder) for option in options]
        command = [*COMMAND, f"-Wl,-soname,{name}", "-o", str(folder / name), *paths, *linked]
        subprocess.run(command, check=True)
