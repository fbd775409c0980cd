"""Block and page ids as callers have them, as lists of int64 in memory."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

Ids = Sequence[int] | npt.NDArray[Any] | Tensor


def read_ids(name: str, ids: Ids) -> array[int]:
    """A copy of the ids. Raises TypeError for what are no integers, ValueError for a wrong shape or
    device, IndexError for what no int64 holds."""
    if isinstance(ids, Tensor):
        if ids.device.type != "cpu":
            raise ValueError(
                f"{name} is on {ids.device}, but ids are read on the host; pass {name}.cpu()"
            )
        if ids.is_floating_point() or ids.is_complex():  # numpy lacks some of these types
            raise TypeError(f"{name} is of {ids.dtype}; ids must be integers")
        ids = ids.numpy()
    if isinstance(ids, np.ndarray):
        return _from_numpy(name, ids)
    if not isinstance(ids, Sequence) or isinstance(ids, bytes | bytearray | str):
        raise TypeError(f"{name} is a {type(ids).__name__}; pass a list, numpy array or CPU tensor")
    try:
        return array("q", ids)
    except (TypeError, OverflowError):
        return _from_numpy(name, _as_numpy(name, ids))


def _as_numpy(name: str, ids: Sequence[int]) -> npt.NDArray[Any]:
    try:
        return np.asarray(ids)
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{name} must have one dimension: {error}") from error


def _from_numpy(name: str, ids: npt.NDArray[Any]) -> array[int]:
    if ids.ndim != 1:
        raise ValueError(f"{name} has shape {list(ids.shape)}; it must have one dimension")
    if ids.dtype.kind not in "iu":
        raise TypeError(f"{name} is of {ids.dtype}; ids must be integers")
    if ids.dtype == np.uint64 and ids.size and int(ids.max()) >= 2**63:
        position = int(np.argmax(ids >= 2**63))
        raise IndexError(f"{name}[{position}] is {ids[position]}; no block has such a number")
    return array("q", ids.astype(np.int64).tobytes())
