"""The structures and functions of csrc/capi.h, and the exceptions that stand for their errors."""

from __future__ import annotations

import builtins
import ctypes
from typing import Any, NoReturn

from torch_kvswap._native import loader
from torch_kvswap.metrics import PATHS

AFTER_CURRENT, AFTER_STREAM, AFTER_EVENT, AFTER_NOTHING = range(4)
STORES, LOADS, EXPEDITED = range(3)
QUEUED, RUNNING, DONE, FAILED, CANCELLED = range(5)

_Int64s = ctypes.c_void_p  # the address of a list of int64


class UsablePages(ctypes.Structure):
    _fields_ = (
        ("first_page", ctypes.c_int64),
        ("last_page", ctypes.c_int64),
        ("chunk_blocks", ctypes.c_int64),
    )


class Group(ctypes.Structure):
    _fields_ = (
        ("gpu_bases", _Int64s),
        ("gpu_strides", _Int64s),
        ("gpu_storages", _Int64s),
        ("sizes", _Int64s),
        ("host_bases", _Int64s),
        ("host_strides", _Int64s),
        ("layers", _Int64s),
        ("planes", ctypes.c_int64),
        ("num_blocks", ctypes.c_int64),
        ("num_pages", ctypes.c_int64),
        ("blocks_per_page", ctypes.c_int64),
        ("block_space", ctypes.c_int32),
        ("slot_space", ctypes.c_int32),
        ("usable", ctypes.c_void_p),
    )


FRAGMENT_SIZES = 14


class PathCosts(ctypes.Structure):
    _fields_ = (
        ("start_seconds", ctypes.c_double),
        ("block_seconds", ctypes.c_double),
        ("fragment_seconds", ctypes.c_double * FRAGMENT_SIZES),
    )


class PathOptions(ctypes.Structure):
    _fields_ = (
        ("path", ctypes.c_int32),
        ("staging_bytes", ctypes.c_uint64),
        ("costs", (PathCosts * len(PATHS)) * 2),  # of stores, of loads
    )


class Request(ctypes.Structure):
    _fields_ = (
        ("began", ctypes.c_double),
        ("channel", ctypes.c_int32),
        ("layer_groups", ctypes.c_int32),
        ("after_kind", ctypes.c_int32),
        ("grouped", ctypes.c_int32),
        ("background", ctypes.c_int32),
        ("after", ctypes.c_void_p),
        ("gate", ctypes.c_void_p),
        ("blocks", _Int64s),
        ("pages", _Int64s),
        ("counts", _Int64s),
        ("id", ctypes.c_int64),
    )


class JobResult(ctypes.Structure):
    _fields_ = (
        ("id", ctypes.c_int64),
        ("nbytes", ctypes.c_uint64),
        ("submit_seconds", ctypes.c_double),
        ("queue_seconds", ctypes.c_double),
        ("copy_seconds", ctypes.c_double),
        ("channel", ctypes.c_int32),
        ("layer_groups", ctypes.c_int32),
        ("path", ctypes.c_int32),
        ("state", ctypes.c_int32),
        ("error", ctypes.c_char_p),
        ("job", ctypes.c_void_p),
    )


def fail() -> NoReturn:
    """Raises what the calling thread's last call has failed with."""
    native = loader.library()
    error: Any = getattr(builtins, native.kvswap_last_error_type().decode())
    raise error(native.kvswap_last_error().decode())


def call(name: str, *arguments: Any) -> Any:
    """Calls the function; raises when it returns null, false or -1: so it says that it failed."""
    result = getattr(loader.library(), name)(*arguments)
    if result is None or result is False or result == -1:
        fail()
    return result
