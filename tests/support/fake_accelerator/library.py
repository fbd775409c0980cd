"""Builds the accelerator's library when its sources or PyTorch have changed."""

from __future__ import annotations

import subprocess
from functools import cache, partial
from pathlib import Path

import torch
from native_builds import build_once
from torch.utils import cpp_extension

SOURCES = Path(__file__).with_name("library")
NAME = "libfake_accelerator.so"
COMMAND = ["g++", "-std=c++20", "-O1", "-Wall", "-Wextra", "-Werror", "-fPIC", "-pthread"]


@cache
def build(device_type: str = "PrivateUse1") -> Path:
    """The library, made by the first that asks. device_type: C++'s name of its type for PyTorch."""
    command = [*COMMAND, f"-DFAKE_TYPE={device_type}"]
    settings = f"{command} PyTorch {torch.__version__} in {torch.__path__}"
    name = f"fake-accelerator-{device_type.lower()}"
    compile_all = partial(_compile, command)
    return build_once(name, SOURCES.iterdir(), settings, compile_all) / NAME


def _compile(settings: list[str], folder: Path) -> None:
    includes = [f"-isystem{path}" for path in cpp_extension.include_paths()]
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    objects, running = [], []
    for source in sorted(SOURCES.glob("*.cpp")):
        objects.append(str(folder / f"{source.stem}.o"))
        command = [*settings, abi, *includes, "-c", str(source), "-o", objects[-1]]
        running.append(subprocess.Popen(command))
    assert not any([process.wait() for process in running]), "the fake accelerator does not compile"
    libraries = [f"-L{path}" for path in cpp_extension.library_paths()] + ["-ltorch_cpu", "-lc10"]
    command = [*settings, "-shared", "-o", str(folder / NAME), *objects, *libraries]
    subprocess.run(command, check=True)
    for file in objects:
        Path(file).unlink()
