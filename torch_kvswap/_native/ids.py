"""Reads ids that native code does not read by itself: rare types, and wrong ones.

csrc/bindings/ids.cpp reads lists of int, and arrays of 32 or 64 bits.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from torch_kvswap._native.arguments import (
    CONVERSION_ERRORS,
    INT64_MIN,
    count_of,
    kind_of,
    read_int,
)
from torch_kvswap._native.loader import native

Ids = Sequence[int] | npt.NDArray[Any] | Tensor


def read_ids(name: str, ids: Ids, num_groups: int = 1) -> array[int]:
    """Copies ids to an int64 array.

    Args:
        name (str): the argument, as the caller wrote it.
        ids: 1-D list, numpy array or CPU tensor of integers.
        num_groups (int): for how many groups the caller passes such ids.

    Raises:
        TypeError: ids contains something that is not an integer.
        ValueError: wrong shape or device.
        IndexError: an id does not fit into int64.
    """
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
        if bool not in map(type, ids):
            return array("q", ids)
    except CONVERSION_ERRORS:
        pass  # _read_id() names the one that is wrong
    return array("q", [_read_id(f"{name}[{at}]", id_) for at, id_ in enumerate(ids)])


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


def split_groups(name: str, several: object, num_groups: int) -> Sequence[Any]:
    """The part of an argument for each group.

    Raises:
        TypeError: it is no list.
        ValueError: the list has another number of items.
    """
    if isinstance(several, bytes | bytearray | memoryview | str) or not isinstance(
        several, Sequence
    ):
        raise TypeError(f"{name} is {kind_of(several)}; pass a list with an item for each group")
    if len(several) != num_groups:
        raise ValueError(
            f"{name} has {count_of(len(several), 'item')} for {count_of(num_groups, 'group')}; "
            "pass one for each group, an empty one for a group without blocks"
        )
    return several


def _read_first_slots(first_slot: object, num_groups: int) -> list[int]:
    """The first slot of each group. The native side checks it against blocks_per_page.

    Args:
        first_slot (object): as in OffloadHandler.store().
        num_groups (int): 0 for a handler without a list of groups.
    """
    if not num_groups or not isinstance(first_slot, Sequence | np.ndarray):
        return [read_int("first_slot", first_slot, INT64_MIN)] * max(num_groups, 1)
    if len(first_slot) != num_groups:
        raise ValueError(
            f"first_slot has length {len(first_slot)}; this handler has "
            f"{count_of(num_groups, 'group')}: pass a number for each, or one for all"
        )
    return [
        read_int(f"first_slot[{group}]", of_group, INT64_MIN)
        for group, of_group in enumerate(first_slot)
    ]


native.set_python(read_ids=read_ids, split_ids=split_groups, read_first_slots=_read_first_slots)
native.set_python(empty=np.empty, int64=np.dtype(np.int64))
