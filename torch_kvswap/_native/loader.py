"""Loads the native library, csrc/bindings, and remembers the process that made an object."""

from __future__ import annotations

import hashlib
import os
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from torch_kvswap._native.environment import warn_of_wrong
from torch_kvswap._native.log import log

__all__ = ["ForkGuard", "native", "ops"]

FOLDER = Path(__file__).parents[1]
ops: Any = torch.ops  # its attributes lack type annotations
WITHOUT_KERNELS = "so the GPU stages and encodes nothing, and expand_block_ids takes CPU ids only"
_DRIVER = Path("/proc/driver/nvidia/version")
_BUILD = "(`make build` in a checkout, else `pip install --no-build-isolation .`)"


def load() -> ModuleType:
    """Loads the native library, which registers its ops with torch.

    Does not initialise CUDA.

    Raises:
        ImportError: Python runs without the GIL, the library is missing or of another release, or
            this torch or this Python cannot load it.
    """
    if not getattr(sys, "_is_gil_enabled", lambda: True)():  # Pythons before 3.13 always have it
        raise ImportError(
            "torch_kvswap needs Python's GIL, which guards its results, tags and counters. This "
            "free-threaded Python runs without it: set PYTHON_GIL=1, start it with -X gil=1, or "
            "use another Python."
        )
    try:
        native = import_module("torch_kvswap._C")
    except ImportError as error:
        built = sorted(path.name for path in FOLDER.glob("_C.*so"))
        if error.path is None:  # none that this Python would load
            others = f"; {', '.join(built)} is for another Python" if built else ""
            version = ".".join(map(str, sys.version_info[:2]))
            raise ImportError(
                f"torch_kvswap's native library is missing: {FOLDER} has none for Python "
                f"{version}{others}. Build it {_BUILD}.{_installed_elsewhere()}"
            ) from None  # that torch_kvswap._C is missing says no more
        raise ImportError(
            f"torch {torch.__version__} cannot load torch_kvswap's native library {error.path}: "
            f"{error}. It needs torch 2.11 or later; with such a torch, build it again on this "
            f"machine {_BUILD}."
        ) from error
    expected = hashlib.sha256((FOLDER / "_C.pyi").read_bytes()).hexdigest()
    if getattr(native, "stub", str)() != expected:
        raise ImportError(
            f"torch_kvswap's native library {native.__file__} and its Python files are of "
            f"different releases. Build it again {_BUILD}."
        )
    if not native.kernel_version() and torch.version.cuda and _DRIVER.exists():
        log.warning(
            "torch_kvswap was built without CUDA kernels, %s; install nvcc 12.0 or later and build "
            "it again %s",
            *(WITHOUT_KERNELS, _BUILD),
        )
    warn_of_wrong()
    return native


def _installed_elsewhere() -> str:
    """What to do if this source tree hides an installation with a native library."""
    for folder in map(Path, sys.path):
        if any((folder / FOLDER.name).glob("_C.*so")):
            return (
                f" Or, for a program outside of this source tree, which hides the torch_kvswap in "
                f"{folder}: start Python in another folder."
            )
    return ""


if TYPE_CHECKING:
    from torch_kvswap import _C as native  # noqa: N811
else:
    native = load()


class ForkGuard:
    """Remembers the process in which an object was made, and detects forked children."""

    def __init__(self) -> None:
        self.pid = os.getpid()

    @property
    def is_current(self) -> bool:
        """Whether the calling process is the remembered one."""
        return os.getpid() == self.pid

    def check(self, noun: str) -> None:
        """Raises RuntimeError in a forked child.

        Args:
            noun (str): what the object is, for the message.
        """
        if os.getpid() != self.pid:
            raise RuntimeError(
                f"this {noun} belongs to process {self.pid} and cannot be used in process "
                f"{os.getpid()}, forked from it; make a {noun} in each process"
            )
