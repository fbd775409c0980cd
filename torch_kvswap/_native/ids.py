"""Block and page ids as callers have them, as lists of int64 in memory."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from torch_kvswap._native.arguments import INT64_MIN, read_int

_FEW = 32  # from here on packing is faster, 7 ns an id instead of 15

Ids = Sequence[int] | npt.NDArray[Any] | Tensor


def read_ids(name: str, ids: Ids) -> array[int]:
    """A copy of the ids. Raises TypeError for what are no integers, ValueError for a wrong shape or
    device, IndexError for what no int64 holds."""
    if type(ids) is not list:  # asked first: what else it may be takes longer than the copy
        if isinstance(ids, Tensor):
            ids = _of_tensor(name, ids)
        if isinstance(ids, np.ndarray):
            return _from_numpy(name, ids)
        if not isinstance(ids, Sequence) or isinstance(ids, bytes | bytearray | str):
            kind = type(ids).__name__
            raise TypeError(f"{name} is a {kind}; pass a list, numpy array or CPU tensor")
    try:
        if len(ids) < _FEW:
            return array("q", ids)
        return array("q", struct.pack(f"{len(ids)}q", *ids))
    except (TypeError, ValueError, OverflowError, struct.error):
        return array("q", [_read_id(f"{name}[{at}]", id_) for at, id_ in enumerate(ids)])


def _of_tensor(name: str, ids: Tensor) -> npt.NDArray[Any]:
    if ids.device.type != "cpu":
        raise ValueError(
            f"{name} is on {ids.device}, but ids are read on the host; pass {name}.cpu()"
        )
    if ids.is_floating_point() or ids.is_complex():  # numpy lacks some of these types
        raise TypeError(f"{name} is of {ids.dtype}; ids must be integers")
    of_tensor: npt.NDArray[Any] = ids.numpy()
    return of_tensor


def _read_id(name: str, value: object) -> int:
    if isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray):
        raise ValueError(f"{name} is a {type(value).__name__}; the ids must have one dimension")
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
