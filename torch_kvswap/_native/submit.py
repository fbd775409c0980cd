"""Converts the arguments of a submission for the native side: ids, streams and events."""

from __future__ import annotations

import struct
import time
from array import array
from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from torch_kvswap._native import abi, loader
from torch_kvswap._native.arguments import (
    CONVERSION_ERRORS,
    INT64_MIN,
    count_of,
    kind_of,
    read_int,
    read_switch,
)

if TYPE_CHECKING:
    from torch_kvswap.groups import Groups

_AFTER_CURRENT = abi.AFTER_CURRENT, None
_has_moved = loader.library().kvswap_cache_moved
CURRENT = -1  # device number that stands for the current stream of the cache's GPU

# What a transfer starts after: a stream, an event, nothing, or (None) the current stream.
# torch.cuda.Stream and the streams of other devices are torch.Streams; so with events.
After = torch.Stream | torch.Event | tuple[()] | None


def resolve_after(after: object, device: torch.device) -> tuple[int, int | None]:
    """Converts an `after` argument.

    Args:
        after: see After.
        device (torch.device): the device of the cache.

    Returns:
        tuple[int, int | None]: kind (abi.AFTER_...) and handle of the stream or event.

    Raises:
        TypeError: after is something else, or a stream or event for a cache on the CPU.
        ValueError: the event was never recorded, or the stream is on another device.
    """
    if after is None:
        return _AFTER_CURRENT
    if isinstance(after, tuple) and not after:
        return abi.AFTER_NOTHING, None
    if device.type == "cpu":
        raise TypeError(
            f"after= is {kind_of(after)}, but transfers of a cache on the CPU run inside "
            "the call and cannot wait for a stream; wait on the host first, and pass None or "
            "AFTER_NOTHING"
        )
    if isinstance(after, torch.cuda.Event):
        if not after.cuda_event:  # created when first recorded; CUDA would ignore a wait before
            raise ValueError(
                "after= is an event that was never recorded, so the transfer would wait for "
                "nothing; record it behind the work it stands for, or pass that stream"
            )
        return abi.AFTER_EVENT, after.cuda_event
    if not isinstance(after, torch.cuda.Stream):
        raise TypeError(
            "after= must be None (the current stream), a torch.cuda.Stream, a "
            f"torch.cuda.Event or AFTER_NOTHING, not {kind_of(after)}"
        )
    if after.device != device:
        raise ValueError(
            f"after= is a stream of {after.device}, the transfer is on {device}; record "
            "an event on that stream and pass the event"
        )
    return abi.AFTER_STREAM, after.cuda_stream


def resolve_waiting(stream: object, device: torch.device) -> tuple[int | None, int]:
    """Converts the stream that is to wait.

    Args:
        stream: a torch.cuda.Stream of any GPU, or None for the current stream of the cache's GPU.
        device (torch.device): the device of the cache.

    Returns:
        tuple[int | None, int]: handle and GPU of the stream, (None, CURRENT) for None. The handle
            alone is not enough: 0 is the default stream of every GPU.

    Raises:
        TypeError: stream is something else.
    """
    if stream is None:
        return None, CURRENT
    if not isinstance(stream, torch.cuda.Stream):  # torch would take any object as a stream
        if device.type == "cpu":
            raise TypeError(
                f"stream is {kind_of(stream)}, but the cache is on the CPU: its transfers have "
                "ended when store() or load() returns, so no stream has to wait; pass None"
            )
        raise TypeError(f"stream is {kind_of(stream)}; pass a torch.cuda.Stream or None")
    return stream.cuda_stream, stream.device.index


# For more ids, struct.pack and numpy are faster: 10 ns per id instead of 27. But their code, where
# it is not in the processor's caches, costs 80 us more.
_FEW = 1024

Ids = Sequence[int] | npt.NDArray[Any] | Tensor


def read_ids(name: str, ids: Ids, num_groups: int = 1) -> array[int]:
    """Copies ids to an int64 array.

    Args:
        name (str): the argument, as the caller wrote it.
        num_groups (int): for how many groups the caller passes such ids.
        ids: 1-D list, numpy array or CPU tensor of integers, or an array("q"), which is the
            fastest.

    Raises:
        TypeError: ids contains something that is not an integer.
        ValueError: wrong shape or device.
        IndexError: an id does not fit into int64.
    """
    if type(ids) is not list:  # checked first: the other checks take longer than the copy
        if type(ids) is array and ids.typecode == "q":  # can only contain ids
            return ids[:]
        if isinstance(ids, Tensor):
            ids = _of_tensor(name, ids)
        if isinstance(ids, np.ndarray):
            return _from_numpy(name, ids)
        if not isinstance(ids, Sequence) or isinstance(ids, bytes | bytearray | str):
            advice = "pass a list, numpy array or CPU tensor"
            if num_groups > 1:
                advice = f"this handler has {num_groups} groups: {advice} for each"
            raise TypeError(f"{name} is {kind_of(ids)}; {advice}")
    try:
        if len(ids) < _FEW:
            packed = array("q", ids)
            is_wrong = bool in map(type, ids)
        else:
            packed = array("q", struct.pack(f"{len(ids)}q", *ids))
            maybe = np.flatnonzero(np.frombuffer(packed, np.uint64) < 2)  # few: bools are 0 and 1
            is_wrong = any(isinstance(ids[at], bool) for at in maybe.tolist())
    except (*CONVERSION_ERRORS, struct.error):
        is_wrong = True
    if is_wrong:
        return array("q", [_read_id(f"{name}[{at}]", id_) for at, id_ in enumerate(ids)])
    return packed


def _of_tensor(name: str, ids: Tensor) -> npt.NDArray[Any]:
    if ids.device.type != "cpu":
        raise ValueError(
            f"{name} is on {ids.device}, but ids are read on the host; pass {name}.cpu()"
        )
    # numpy lacks some of these types, and names others differently
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise TypeError(f"{name} is of {ids.dtype}; ids must be integers")
    try:
        of_tensor: npt.NDArray[Any] = ids.numpy()
    except (RuntimeError, TypeError) as error:  # quantized, sparse, or of bits
        raise TypeError(f"{name} is of {ids.dtype} and cannot be read: {error}") from error
    return of_tensor


def _read_id(name: str, value: object) -> int:
    if isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray):
        raise ValueError(f"{name} is {kind_of(value)}; the ids must have one dimension")
    if isinstance(value, bool):  # part of a mask
        raise TypeError(f"{name} is a bool; it must be an integer")
    try:
        return read_int(name, value, INT64_MIN)
    except ValueError:
        raise IndexError(f"{name} is {value}; no block has such a number") from None


def _from_numpy(name: str, ids: npt.NDArray[Any]) -> array[int]:
    if ids.ndim != 1:
        raise ValueError(f"{name} has shape {list(ids.shape)}; it must have one dimension")
    if ids.dtype.kind not in "iu":
        raise TypeError(f"{name} is of {ids.dtype}; ids must be integers")
    if ids.dtype == np.uint64 and ids.size and int(ids.max()) >= 2**63:
        position = int(np.argmax(ids >= 2**63))
        raise IndexError(f"{name}[{position}] is {ids[position]}; no block has such a number")
    return array("q", ids.astype(np.int64).tobytes())


class Request:
    """One checked submission. To be kept until it was submitted.

    Args:
        groups: the groups of the handler.
        channel (int): abi.STORES, abi.LOADS or abi.EXPEDITED.
        ids: gpu_block_ids, page_ids and first_block, see OffloadHandler.
        after, layer_groups, copy_engines_only: see OffloadHandler.
        gate (int | None): a native gate.
        token (int): abi.JobResult.token of the job.

    Attributes:
        numbers (array[int]): laid out like abi.Request and the counts that follow it, but faster to
            make. They point to copies of the ids, which this object holds. The first three are id,
            nbytes and reference of the native job, which submission sets together; 0 before.
        channel, layer_groups: see above.

    Raises:
        TypeError, ValueError, IndexError: an argument is wrong.
        RuntimeError: a tensor of the cache has moved, or `after` cannot be recorded.
        DeviceLostError: a device that torch drives is lost.
    """

    __slots__ = ("_held", "channel", "layer_groups", "numbers")

    def __init__(
        self,
        groups: Groups,
        channel: int,
        ids: tuple[Any, Any, Any],
        after: object,
        layer_groups: int = 1,
        gate: int | None = None,
        copy_engines_only: bool = False,
        token: int = 0,
    ) -> None:
        # Each Python function that this path calls costs 3 us or more when it is not in the caches:
        # what callers leave out, and tensors that have not moved, need none.
        began = time.perf_counter_ns()
        gpu_block_ids, page_ids, first_block = ids
        if _has_moved(groups.guard.native):
            groups.guard.check()
        if groups.is_list:
            blocks, pages, counts = _read_lists(groups, gpu_block_ids, page_ids, first_block)
        else:
            blocks = read_ids("gpu_block_ids", gpu_block_ids)
            pages = read_ids("page_ids", page_ids)
            first = 0
            if type(first_block) is not int or first_block:
                first = read_int("first_block", first_block, INT64_MIN)
            counts = len(blocks), len(pages), first
        if copy_engines_only is not False and copy_engines_only is not True:
            copy_engines_only = read_switch("copy_engines_only", copy_engines_only)
        resolved: tuple[Any, ...] = _AFTER_CURRENT
        if after is not None or groups.queue is not None:
            resolved = groups.resolve_after(after)
        self._held = blocks, pages, resolved
        self.channel, self.layer_groups = channel, layer_groups
        numbers = [
            0,  # id
            0,  # nbytes
            0,  # job
            token,
            began,
            channel,
            layer_groups,
            groups.is_list,
            copy_engines_only,
            resolved[0],
            resolved[1] or 0,
            gate or 0,
            blocks.buffer_info()[0],
            pages.buffer_info()[0],
            *counts,
        ]
        self.numbers = array("q", numbers)


def _read_lists(
    groups: Groups, gpu_block_ids: Any, page_ids: Any, first_block: object
) -> tuple[array[int], array[int], tuple[int, ...]]:
    """The ids of all groups in a row, and per group: number of blocks, of pages, first block."""
    blocks, num_blocks = _join("gpu_block_ids", gpu_block_ids, groups)
    pages, num_pages = _join("page_ids", page_ids, groups)
    first_blocks = _first_blocks(first_block, len(num_blocks))
    counts = chain.from_iterable(zip(num_blocks, num_pages, first_blocks, strict=True))
    return blocks, pages, tuple(counts)


def _first_blocks(first_block: object, groups: int) -> list[int]:
    """The first block of each group. The native side checks it against blocks_per_page."""
    if not isinstance(first_block, Sequence | np.ndarray):
        return [read_int("first_block", first_block, INT64_MIN)] * groups
    if len(first_block) != groups:
        raise ValueError(
            f"first_block has length {len(first_block)}; this handler has "
            f"{count_of(groups, 'group')}: pass a number for each, or one for all"
        )
    return [
        read_int(f"first_block[{group}]", of_group, INT64_MIN)
        for group, of_group in enumerate(first_block)
    ]


def _join(name: str, ids: Any, groups: Groups) -> tuple[array[int], list[int]]:
    """The ids of all groups in a row, and the number of each group."""
    if not isinstance(ids, Sequence) or len(ids) != len(groups.layouts):
        raise ValueError(
            f"{name} must be a list with a list of ids for each group, and this handler has "
            f"{count_of(len(groups.layouts), 'group')}; use an empty list for a group without "
            "blocks"
        )
    lists = [read_ids(f"{name}[{group}]", of_group, len(ids)) for group, of_group in enumerate(ids)]
    joined = array("q")
    for one in lists:
        joined.extend(one)
    return joined, [len(one) for one in lists]
