"""Builds the simulated driver's libraries when their sources have changed."""

from __future__ import annotations

import hashlib
import os
import shlex
import subprocess
from fcntl import LOCK_EX, flock
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

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
    files = sorted(path for folder in SOURCES.values() for path in (HERE / folder).iterdir())
    files.append(ROOT / "csrc" / "copy" / "pack_arguments.h")
    digest = hashlib.sha256(" ".join(COMMAND).encode())
    for path in files:
        digest.update(path.name.encode() + path.read_bytes())
    builds = ROOT / "build"
    folder = builds / f"simulated-driver-{digest.hexdigest()[:16]}"
    builds.mkdir(exist_ok=True)
    with (builds / "simulated-driver.lock").open("w") as lock:
        flock(lock, LOCK_EX)  # one process compiles, the others wait for it
        if not folder.exists():
            _compile(folder)
    return folder


def _compile(folder: Path) -> None:
    made = Path(mkdtemp(prefix="simulated-driver-", dir=folder.parent))
    running = []
    for name, sources in SOURCES.items():
        paths = [str(path) for path in sorted((HERE / sources).glob("*.cpp"))]
        command = [*COMMAND, f"-Wl,-soname,{name}", "-o", str(made / name), *paths]
        running.append(subprocess.Popen(command))
    assert [process.wait() for process in running] == [0] * len(SOURCES)
    made.rename(folder)
