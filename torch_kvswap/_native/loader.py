"""Loads the native library, and says why when it cannot."""

import ctypes
import functools
from pathlib import Path
from typing import Any, TypeVar

import torch

_Pointer, _Int, _Bool, _Text = ctypes.c_void_p, ctypes.c_int, ctypes.c_bool, ctypes.c_char_p
_Long, _Real = ctypes.c_int64, ctypes.c_double

# The functions of csrc/capi.h: what they return, then what they take.
PROTOTYPES: dict[str, tuple[Any, ...]] = {
    "kvswap_driver_version": (_Int,),
    "kvswap_driver_error": (_Text,),
    "kvswap_driver_has_batch": (_Bool,),
    "kvswap_batch_limit": (_Int,),
    "kvswap_kernel_version": (_Int,),
    "kvswap_host_register": (_Bool, _Int, _Pointer, ctypes.c_uint64),
    "kvswap_host_unregister": (_Bool, _Int, _Pointer),
    "kvswap_host_is_pinned": (_Int, _Int, _Pointer),
    "kvswap_device_pci_address": (_Bool, _Int, _Pointer),
    "kvswap_host_map": (_Pointer, _Int, ctypes.c_uint64, ctypes.c_uint64, _Bool),
    "kvswap_host_unmap": (None, _Pointer, ctypes.c_uint64),
    "kvswap_host_bind": (_Bool, _Pointer, ctypes.c_uint64, _Int),
    "kvswap_host_touch": (_Bool, _Pointer, ctypes.c_uint64, _Int, _Bool, _Pointer, _Int),
    "kvswap_usable_pages_publish": (None, _Pointer, _Long, _Long),
    "kvswap_last_error": (_Text,),
    "kvswap_last_error_type": (_Text,),
    "kvswap_cache_moved": (_Bool, _Pointer),
    "kvswap_cache_release": (None, _Pointer),
    "kvswap_handler_create": (_Pointer, _Pointer, _Int, ctypes.c_int64, _Int, _Bool, _Pointer),
    "kvswap_handler_path_problem": (_Text, _Pointer),
    "kvswap_handler_destroy": (None, _Pointer),
    "kvswap_handler_rebind": (_Bool, _Pointer, _Pointer, _Int),
    "kvswap_handler_submit": (_Pointer, _Pointer, _Pointer),
    "kvswap_handler_finished": (_Int, _Pointer, _Pointer, _Int),
    "kvswap_handler_wait": (_Int, _Pointer, _Pointer, _Int, ctypes.c_double),
    "kvswap_handler_unreported_failures": (_Int, _Pointer, _Pointer, _Int),
    "kvswap_handler_close": (_Int, _Pointer, ctypes.c_double),
    "kvswap_handler_metrics": (_Bool, _Pointer, _Int, _Pointer),
    "kvswap_job_release": (None, _Pointer),
    "kvswap_job_result": (_Bool, _Pointer, _Pointer, _Pointer),
    "kvswap_job_done": (_Int, _Pointer, _Pointer),
    "kvswap_job_wait_on": (_Bool, _Pointer, _Pointer, _Int, _Pointer, _Int),
    "kvswap_job_cancel": (_Int, _Pointer, _Pointer),
    "kvswap_gate_create": (_Pointer, _Pointer, _Int),
    "kvswap_gate_release": (None, _Pointer),
    "kvswap_gate_wait": (_Bool, _Pointer, _Int, _Pointer, _Int),
    "kvswap_blocks_create": (_Pointer, _Pointer, _Int, _Pointer),
    "kvswap_blocks_destroy": (None, _Pointer),
    "kvswap_blocks_grow": (_Bool, _Pointer, _Pointer),
    "kvswap_blocks_lookup": (_Long, _Pointer, _Pointer, _Pointer, _Bool, _Pointer, _Bool),
    "kvswap_blocks_prepare_load": (_Long, *[_Pointer] * 4, _Bool),
    "kvswap_blocks_prepare_store": (_Long, *[_Pointer] * 3, _Real, _Bool, *[_Pointer] * 5, _Bool),
    "kvswap_blocks_end": (_Long, _Pointer, _Long, _Bool, _Bool),
    "kvswap_blocks_touch": (_Long, _Pointer, _Pointer, _Pointer, _Bool),
    "kvswap_blocks_order": (_Long, _Pointer, _Pointer, _Pointer, _Bool, _Bool),
    "kvswap_blocks_lease": (_Long, _Pointer, _Pointer, _Pointer, _Real, _Real, _Bool),
    "kvswap_blocks_release": (_Long, _Pointer, _Long, _Bool),
    "kvswap_blocks_reset": (_Bool, _Pointer),
    "kvswap_blocks_events": (_Long, _Pointer, _Pointer, _Long),
    "kvswap_blocks_stats_of": (_Bool, _Pointer, _Int, _Real, _Pointer),
}
# They take microseconds, and wait for no lock that is held for longer. To let the GIL go costs
# more: a thread that computes in Python gives it back only after milliseconds. The calls of a block
# manager are made in both ways, see holding().
HOLD_THE_GIL = (
    *("kvswap_cache_moved", "kvswap_cache_release", "kvswap_job_release"),
    "kvswap_usable_pages_publish",
)
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
    """The native library's C interface. Calls through it release the GIL, but for HOLD_THE_GIL."""
    load()
    handle = _declared(ctypes.CDLL(str(PATH)))
    for name in HOLD_THE_GIL:
        setattr(handle, name, getattr(holding(), name))
    return handle


@functools.cache
def holding() -> ctypes.PyDLL:
    """The C interface, for calls that keep the GIL. None of them may wait for another thread."""
    load()
    return _declared(ctypes.PyDLL(str(PATH)))


def _declared(handle: _Library) -> _Library:
    for name, (result, *arguments) in PROTOTYPES.items():
        function = getattr(handle, name)
        function.restype, function.argtypes = result, arguments
    return handle
