"""Loads the native library, and says why when it cannot."""

import ctypes
import functools
from pathlib import Path
from typing import Any

import torch

# The functions of csrc/capi.h: what they return, then what they take.
PROTOTYPES: dict[str, tuple[Any, ...]] = {
    "kvswap_driver_version": (ctypes.c_int,),
    "kvswap_driver_error": (ctypes.c_char_p,),
    "kvswap_driver_has_batch": (ctypes.c_bool,),
    "kvswap_batch_limit": (ctypes.c_int,),
    "kvswap_kernel_version": (ctypes.c_int,),
    "kvswap_stream_create": (ctypes.c_void_p, ctypes.c_int),
    "kvswap_stream_destroy": (ctypes.c_bool, ctypes.c_int, ctypes.c_void_p),
    "kvswap_last_error": (ctypes.c_char_p,),
}
PATH = Path(__file__).with_name("_C.abi3.so")
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
    """The native library's C interface. Calls through it release the GIL."""
    load()
    handle = ctypes.CDLL(str(PATH))
    for name, (result, *arguments) in PROTOTYPES.items():
        function = getattr(handle, name)
        function.restype, function.argtypes = result, arguments
    return handle
