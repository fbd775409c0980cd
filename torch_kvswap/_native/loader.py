"""Loads the native library, or says why it cannot, and calls it."""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch

from torch_kvswap._native import abi
from torch_kvswap._native.errors import error_type

PATH = Path(__file__).parent.with_name("_C.abi3.so")
_Library = TypeVar("_Library", bound=ctypes.CDLL)
ops: Any = torch.ops  # torch has no type for load_library


@functools.cache
def load() -> None:
    """Load the native library, which registers its ops with torch. Later calls do nothing.

    Thread-safe. Does not touch CUDA. Raises ImportError if the library is not there, or if the
    torch that runs cannot load it.
    """
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
    """The native library's C interface. Calls through it release the GIL, but for
    abi.HOLD_THE_GIL."""
    load()
    handle = _declare(ctypes.CDLL(str(PATH)))
    for name in abi.HOLD_THE_GIL:
        setattr(handle, name, getattr(holding(), name))
    return handle


@functools.cache
def holding() -> ctypes.PyDLL:
    """The C interface, for calls that keep the GIL. None of them may wait for another thread."""
    load()
    return _declare(ctypes.PyDLL(str(PATH)))


def _declare(handle: _Library) -> _Library:
    _check_version(handle)
    for name, (result, *arguments) in abi.PROTOTYPES.items():
        function = getattr(handle, name)
        function.restype, function.argtypes = result, arguments
    return handle


def _check_version(handle: ctypes.CDLL) -> None:
    try:
        version: int | None = handle.kvswap_abi_version()
    except AttributeError:  # older than the function
        version = None
    if version != abi.ABI_VERSION:
        raise ImportError(
            f"torch_kvswap's native library {PATH} has version {version} of the C interface, "
            f"Python expects {abi.ABI_VERSION}: they are of different releases. Build it again "
            "(`make build` in a checkout, else `pip install --no-build-isolation .`)."
        )


def fail() -> NoReturn:
    """Raises what the calling thread's last call has failed with."""
    native = library()
    error = error_type(native.kvswap_last_error_type().decode())
    raise error(native.kvswap_last_error().decode())


def call(name: str, *arguments: Any) -> Any:
    """Calls the function; raises when it returns null, false or -1: so it says that it failed."""
    result = getattr(library(), name)(*arguments)
    if result is None or result is False or result == -1:
        fail()
    return result


class ForkGuard:
    """The calling process, remembered."""

    def __init__(self) -> None:
        self.pid = os.getpid()

    @property
    def is_current(self) -> bool:
        return os.getpid() == self.pid

    def check(self, noun: str) -> None:
        """Raises RuntimeError in a process that was forked from the remembered one."""
        if os.getpid() != self.pid:
            raise RuntimeError(
                f"this {noun} is of process {self.pid} and cannot be used in process "
                f"{os.getpid()}, forked from it; make a {noun} in each process"
            )
