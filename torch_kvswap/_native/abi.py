"""The C interface of csrc/capi.h: every constant, structure and function, in one place.

Any change here or there needs a new ABI_VERSION in both: a library with another version is not
loaded.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]

ABI_VERSION = 13

AFTER_CURRENT, AFTER_STREAM, AFTER_EVENT, AFTER_NOTHING = range(4)
STORES, LOADS, EXPEDITED = range(3)
QUEUED, RUNNING, DONE, FAILED, CANCELLED = range(5)
OTHER_ERROR, DEVICE_LOST, SOURCE_FAILED, REJECTED = range(4)
RAW, LOSSLESS = range(2)  # encodings of a group
COPY_METHODS = ("host", "batch", "strided", "staged", "kernel", "generic")  # by number
HOST, CUDA, QUEUED_DEVICE = range(3)  # kinds of devices
(
    COMMAND_BLOCKS,
    COMMAND_BATCH,
    COMMAND_RECORD,
    COMMAND_WAIT,
    COMMAND_CALLER_WAIT,
    COMMAND_DESTROY_EVENT,
    COMMAND_DESTROY_STREAM,
) = range(7)
FRAGMENT_SIZES = 14
BUCKETS = 26
POLLED = 64
DIGEST_BYTES = 32
BLOCKS_FEW_KEYS = 1024
BLOCKS_BUSY = -2

_Int64s = ctypes.c_void_p  # pointer to an array of int64


class ReadyRange(ctypes.Structure):
    """kvswap_ready_range"""

    _fields_ = (
        ("first_page", ctypes.c_int64),
        ("end_page", ctypes.c_int64),
        ("chunk_blocks", ctypes.c_int64),
        ("own_end", ctypes.c_int64),
    )


class Group(ctypes.Structure):
    """kvswap_group"""

    _fields_ = (
        ("gpu_bases", _Int64s),
        ("gpu_strides", _Int64s),
        ("gpu_storages", _Int64s),
        ("sizes", _Int64s),
        ("host_bases", _Int64s),
        ("host_strides", _Int64s),
        ("layers", _Int64s),
        ("num_slabs", ctypes.c_int64),
        ("num_blocks", ctypes.c_int64),
        ("num_pages", ctypes.c_int64),
        ("blocks_per_page", ctypes.c_int64),
        ("block_space", ctypes.c_int32),
        ("slot_space", ctypes.c_int32),
        ("encoding", ctypes.c_int32),
        ("encoding_width_eighths", ctypes.c_int32),
        ("ready_range", ctypes.c_void_p),
        ("number", ctypes.c_int64),
    )


class CopyMethodCosts(ctypes.Structure):
    """kvswap_copy_method_costs"""

    _fields_ = (
        ("start_seconds", ctypes.c_double),
        ("block_seconds", ctypes.c_double),
        ("submit_start_seconds", ctypes.c_double),
        ("submit_copy_seconds", ctypes.c_double),
        ("fragment_seconds", ctypes.c_double * FRAGMENT_SIZES),
    )


class CopyMethodOptions(ctypes.Structure):
    """kvswap_copy_method_options"""

    _fields_ = (
        ("copy_method", ctypes.c_int32),
        ("copy_method_setting", ctypes.c_char_p),
        ("staging_bytes", ctypes.c_uint64),
        ("costs", (CopyMethodCosts * len(COPY_METHODS)) * 2),  # of stores, of loads
    )


class Request(ctypes.Structure):
    """kvswap_request"""

    _fields_ = (
        ("id", ctypes.c_int64),
        ("nbytes", ctypes.c_int64),
        ("job", ctypes.c_void_p),
        ("token", ctypes.c_int64),
        ("began_ns", ctypes.c_int64),
        ("channel", ctypes.c_int64),
        ("layer_groups", ctypes.c_int64),
        ("grouped", ctypes.c_int64),
        ("copy_engines_only", ctypes.c_int64),
        ("after_kind", ctypes.c_int64),
        ("after", ctypes.c_void_p),
        ("gate", ctypes.c_void_p),
        ("blocks", _Int64s),
        ("pages", _Int64s),
    )


class JobResult(ctypes.Structure):
    """kvswap_result"""

    _fields_ = (
        ("id", ctypes.c_int64),
        ("token", ctypes.c_int64),
        ("nbytes", ctypes.c_uint64),
        ("link_bytes", ctypes.c_uint64),
        ("submit_seconds", ctypes.c_double),
        ("queue_seconds", ctypes.c_double),
        ("copy_seconds", ctypes.c_double),
        ("channel", ctypes.c_int32),
        ("layer_groups", ctypes.c_int32),
        ("copy_method", ctypes.c_int32),
        ("state", ctypes.c_int32),
        ("error_kind", ctypes.c_int32),
        ("rejected_count", ctypes.c_int32),
        ("is_cancelling", ctypes.c_int32),
        ("error", ctypes.c_char_p),
        ("rejected", _Int64s),
        ("job", ctypes.c_void_p),
    )


class Ended(ctypes.Structure):
    """kvswap_ended"""

    _fields_ = (
        ("taken", ctypes.c_int64),
        ("count", ctypes.c_int64),
        ("results", JobResult * POLLED),
    )


class SlotFormat(ctypes.Structure):
    """kvswap_slot_format"""

    _fields_ = (
        ("slot_bytes", ctypes.c_uint64),
        ("metadata_bytes", ctypes.c_uint64),
        ("tiles", ctypes.c_int64),
        ("max_escapes", ctypes.c_int64),
    )


class Unended(ctypes.Structure):
    """kvswap_unended"""

    _fields_ = (
        ("count", ctypes.c_int64),
        ("first_id", ctypes.c_int64),
        ("first_channel", ctypes.c_int32),
    )


class Command(ctypes.Structure):
    """kvswap_command"""

    _fields_ = (
        ("kind", ctypes.c_int32),
        ("to_host", ctypes.c_int32),
        ("timed", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
        ("stream", ctypes.c_uint64),
        ("event", ctypes.c_uint64),
        ("record", ctypes.c_uint64),
        ("group", ctypes.c_int64),
        ("first_slab", ctypes.c_int64),
        ("last_slab", ctypes.c_int64),
        ("count", ctypes.c_int64),
        ("numbers", _Int64s * 3),
    )


class Histogram(ctypes.Structure):
    """kvswap_histogram"""

    _fields_ = (("counts", ctypes.c_uint64 * BUCKETS), ("sum", ctypes.c_double))


class Metrics(ctypes.Structure):
    """kvswap_metrics"""

    _fields_ = (
        *(
            (name, ctypes.c_uint64)
            for name in (
                *("submitted", "done", "failed", "cancelled", "bytes"),
                *("link_bytes", "blocks", "encoded_blocks", "rejected_blocks"),
                *("queued", "running", "transfers", "streams", "events"),
            )
        ),
        ("jobs_by_copy_method", ctypes.c_uint64 * len(COPY_METHODS)),
        *((name, Histogram) for name in ("submit", "queue", "copy")),
    )


class BlocksGroup(ctypes.Structure):
    """kvswap_blocks_group"""

    _fields_ = (
        ("num_pages", ctypes.c_int64),
        ("ratio", ctypes.c_int64),
        ("window", ctypes.c_int64),
    )


class BlocksOptions(ctypes.Structure):
    """kvswap_blocks_options"""

    _fields_ = (
        ("policy", ctypes.c_int32),
        ("events", ctypes.c_int32),
        ("store_threshold", ctypes.c_int64),
        ("lookup_capacity", ctypes.c_int64),
    )


class BlocksLookupResult(ctypes.Structure):
    """kvswap_blocks_lookup_result"""

    _fields_ = (
        ("found", ctypes.c_int64),
        ("ready", ctypes.c_int64),
        ("pending", ctypes.c_int64),
    )


class BlocksStats(ctypes.Structure):
    """kvswap_blocks_stats"""

    _fields_ = tuple(
        (name, ctypes.c_uint64)
        for name in (
            *("asked", "hits", "pending", "stored", "loaded", "evicted", "skipped"),
            *("refused", "failed", "pages", "free_pages", "idle_pages", "filling_pages"),
        )
    )


BLOCKS_EVENT = np.dtype([("kind", np.int32), ("group", np.int32), ("key", f"V{DIGEST_BYTES}")])

_Pointer, _Int, _Bool, _Text = ctypes.c_void_p, ctypes.c_int, ctypes.c_bool, ctypes.c_char_p
_Long, _Real = ctypes.c_int64, ctypes.c_double

# Return type of each function, then its argument types.
PROTOTYPES: dict[str, tuple[Any, ...]] = {
    "kvswap_abi_version": (_Int,),
    "kvswap_driver_name": (_Text,),
    "kvswap_driver_version": (_Int,),
    "kvswap_driver_error": (_Text,),
    "kvswap_driver_has_batch": (_Bool,),
    "kvswap_driver_has_stream_words": (_Bool,),
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
    "kvswap_ready_range_publish": (None, _Pointer, _Long, _Long),
    "kvswap_ready_range_check": (_Bool, _Pointer, _Long, _Long),
    "kvswap_encoding_format": (_Bool, _Pointer, _Long, _Int, _Pointer),
    "kvswap_encode_block": (_Int, _Pointer, _Pointer, _Long, _Int, _Pointer),
    "kvswap_decode_block": (_Int, _Pointer, _Pointer, _Long, _Int, _Pointer, _Long, _Long),
    "kvswap_count_escapes": (_Long, _Pointer, _Pointer, _Long),
    "kvswap_last_error": (_Text,),
    "kvswap_last_error_type": (_Text,),
    "kvswap_cache_moved": (_Bool, _Pointer),
    "kvswap_cache_release": (None, _Pointer),
    "kvswap_handler_create": (_Pointer, _Pointer, _Int, _Long, _Int, _Int, _Bool, _Pointer),
    "kvswap_handler_slower_copies": (_Text, _Pointer),
    "kvswap_handler_check_open": (_Bool, _Pointer),
    "kvswap_handler_destroy": (None, _Pointer),
    "kvswap_handler_rebind": (_Bool, _Pointer, _Pointer, _Int, _Pointer),
    "kvswap_handler_submit": (_Bool, _Pointer, _Pointer),
    "kvswap_handler_poll": (_Pointer, _Pointer),
    "kvswap_handler_wait_for_ended": (_Int, _Pointer, _Real),
    "kvswap_handler_synchronize": (_Int, _Pointer, _Pointer, _Int, _Real, _Pointer),
    "kvswap_handler_unreported_failures": (_Int, _Pointer, _Pointer, _Int),
    "kvswap_handler_close": (_Int, _Pointer, ctypes.c_double),
    "kvswap_handler_metrics": (_Bool, _Pointer, _Int, _Pointer),
    "kvswap_job_release": (None, _Pointer),
    "kvswap_job_result": (_Bool, _Pointer, _Pointer, _Pointer),
    "kvswap_job_query": (_Int, _Pointer, _Pointer),
    "kvswap_job_wait": (_Bool, _Pointer, _Pointer, _Int, _Pointer, _Int),
    "kvswap_job_cancel": (_Int, _Pointer, _Pointer),
    "kvswap_gate_create": (_Pointer, _Pointer, _Int),
    "kvswap_gate_release": (None, _Pointer),
    "kvswap_gate_wait": (_Bool, _Pointer, _Int, _Pointer, _Int),
    "kvswap_queue_create": (_Pointer, _Int, _Text, _Bool),
    "kvswap_queue_wait": (_Int, _Pointer, _Real),
    "kvswap_queue_wake": (None, _Pointer),
    "kvswap_queue_is_empty": (_Bool, _Pointer),
    "kvswap_queue_first": (_Bool, _Pointer, _Pointer),
    "kvswap_queue_done": (None, _Pointer),
    "kvswap_queue_happened": (None, _Pointer, ctypes.c_uint64, ctypes.c_uint64, _Real, _Text),
    "kvswap_queue_lose": (None, _Pointer, _Text),
    "kvswap_queue_stop": (None, _Pointer),
    "kvswap_queue_make_event": (_Pointer, _Pointer, _Pointer),
    "kvswap_queue_destroy_event": (None, _Pointer, _Pointer),
    "kvswap_blocks_create": (_Pointer, _Pointer, _Int, _Pointer),
    "kvswap_blocks_destroy": (None, _Pointer),
    "kvswap_blocks_grow": (_Bool, _Pointer, _Pointer),
    "kvswap_blocks_lookup": (_Long, _Pointer, _Pointer, _Pointer, _Bool, _Pointer, _Bool),
    "kvswap_blocks_prepare_load": (_Long, *[_Pointer] * 4, _Bool),
    "kvswap_blocks_prepare_store": (_Long, *[_Pointer] * 3, _Real, _Bool, *[_Pointer] * 5, _Bool),
    "kvswap_blocks_end": (_Long, _Pointer, _Long, _Bool, _Int64s, _Long, _Bool),
    "kvswap_blocks_touch": (_Long, _Pointer, _Pointer, _Pointer, _Bool),
    "kvswap_blocks_order": (_Long, _Pointer, _Pointer, _Pointer, _Bool, _Bool),
    "kvswap_blocks_lease": (_Long, _Pointer, _Pointer, _Pointer, _Real, _Real, _Bool),
    "kvswap_blocks_release": (_Long, _Pointer, _Long, _Bool),
    "kvswap_blocks_reset": (_Bool, _Pointer),
    "kvswap_blocks_take_events": (_Long, _Pointer, _Pointer, _Long),
    "kvswap_blocks_stats_of": (_Bool, _Pointer, _Int, _Real, _Pointer),
}
# Functions that take microseconds and wait for no lock that is held longer. Releasing the GIL would
# cost more: a thread that computes in Python gives it back only after milliseconds. The functions
# of a block manager are called in both ways, see loader.holding().
HOLD_THE_GIL = (
    *("kvswap_cache_moved", "kvswap_cache_release", "kvswap_job_release"),
    *("kvswap_ready_range_publish", "kvswap_ready_range_check"),
    *("kvswap_queue_first", "kvswap_queue_done", "kvswap_queue_happened", "kvswap_queue_lose"),
    *("kvswap_queue_stop", "kvswap_queue_make_event", "kvswap_queue_destroy_event"),
    *("kvswap_queue_wake", "kvswap_queue_is_empty"),
)
