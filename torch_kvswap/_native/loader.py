"""Loads the native library and calls it."""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch

from torch_kvswap._native import abi
from torch_kvswap._native.errors import error_type

PATH = Path(__file__).parent.with_name("_C.abi3.so")
_Library = TypeVar("_Library", bound=ctypes.CDLL)
ops: Any = torch.ops  # load_library lacks a type annotation


@functools.cache
def load() -> None:
    """Loads the native library, which registers its ops with torch. Later calls do nothing.

    Thread-safe. Does not initialise CUDA.

    Raises:
        ImportError: Python runs without the GIL, the library is missing, or this torch cannot load
            it.
    """
    if not getattr(sys, "_is_gil_enabled", lambda: True)():  # Pythons before 3.13 always have it
        raise ImportError(
            "torch_kvswap needs Python's GIL, which guards its results, tags and counters. This "
            "free-threaded Python runs without it: set PYTHON_GIL=1, start it with -X gil=1, or "
            "use another Python."
        )
    if not PATH.exists():
        raise ImportError(
            f"torch_kvswap's native library is missing: there is no {PATH}. In a checkout run "
            "`make build`; else install again with `pip install --no-build-isolation .`, which "
            "compiles it."
        )
    try:
        ops.load_library(PATH)
    except OSError as error:
        raise ImportError(
            f"torch {torch.__version__} cannot load torch_kvswap's native library {PATH}: "
            f"{error.__cause__ or error}. "
            "It needs torch 2.11 or later; with such a torch, build it again on this machine "
            "(`make build` in a checkout, else `pip install --no-build-isolation .`)."
        ) from error


@functools.cache
def library() -> ctypes.CDLL:
    """The C interface of the native library. Its calls release the GIL, except abi.HOLD_THE_GIL."""
    load()
    handle = _declare(ctypes.CDLL(str(PATH)))
    for name in abi.HOLD_THE_GIL:
        setattr(handle, name, getattr(holding(), name))
    return handle


@functools.cache
def holding() -> ctypes.PyDLL:
    """The C interface for calls that keep the GIL. Such a call must not wait for another thread."""
    load()
    return _declare(ctypes.PyDLL(str(PATH)))


def _declare(handle: _Library) -> _Library:
    """Checks the library's version and declares the prototypes of its functions."""
    _check_version(handle)
    for name, (result, *arguments) in abi.PROTOTYPES.items():
        function = getattr(handle, name)
        function.restype, function.argtypes = result, arguments
    return handle


def _check_version(handle: ctypes.CDLL) -> None:
    try:
        version: int | None = handle.kvswap_abi_version()
    except AttributeError:  # a library older than this function
        version = None
    if version != abi.ABI_VERSION:
        raise ImportError(
            f"torch_kvswap's native library {PATH} has version {version} of the C interface, "
            f"Python expects {abi.ABI_VERSION}: they are of different releases. Build it again "
            "(`make build` in a checkout, else `pip install --no-build-isolation .`)."
        )


def fail() -> NoReturn:
    """Raises the error of the calling thread's last failed call."""
    native = library()
    error = error_type(native.kvswap_last_error_type().decode())
    raise error(native.kvswap_last_error().decode())


def call(name: str, *arguments: Any) -> Any:
    """Calls a function of the C interface.

    Args:
        name (str): a key of abi.PROTOTYPES.
        *arguments: as its prototype says.

    Returns:
        what the function returns.

    Raises:
        Exception: the function returned null, False or -1; the type is the one that the library
            names.
    """
    result = getattr(library(), name)(*arguments)
    if result is None or result is False or result == -1:
        fail()
    return result


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
