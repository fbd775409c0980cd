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
SOURCES = {
    "libcuda.so.1": "libcuda",
    "libtorch_cuda.so": "libtorch_cuda",
    "liballocations.so": "liballocations",
}
COMMAND = ["g++", "-std=c++17", "-O1", "-Wall", "-Wextra", "-shared", "-fPIC", "-pthread"]
COMMAND += shlex.split(os.environ.get("CXXFLAGS", ""))  # as the library is compiled


@cache
def build() -> Path:
    """The folder of the libraries of the simulated driver, made by the first that asks."""
    files = [path for folder in SOURCES.values() for path in (HERE / folder).iterdir()]
    files.append(ROOT / "csrc" / "copy" / "pack_arguments.h")
    return build_once("simulated-driver", files, " ".join(COMMAND), _compile)


def _compile(folder: Path) -> None:
    running = []
    for name, sources in SOURCES.items():
        paths = [str(path) for path in sorted((HERE / sources).glob("*.cpp"))]
        command = [*COMMAND, f"-Wl,-soname,{name}", "-o", str(folder / name), *paths]
        running.append(subprocess.Popen(command))
    assert [process.wait() for process in running] == [0] * len(SOURCES)
