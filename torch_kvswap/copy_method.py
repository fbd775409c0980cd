"""Copy methods: what the caller asks for, and the measured costs that the choice is made by."""

from __future__ import annotations

import ctypes
import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from torch_kvswap._native import abi, loader
from torch_kvswap._native.arguments import INT64_MAX, read_int
from torch_kvswap._native.log import log, warn_once
from torch_kvswap.metrics import COPY_METHODS

DIRECTIONS = ("store", "load")
SHIPPED = Path(__file__).with_name("copy_method_costs.json")
GENERIC = "NVIDIA H200"  # of the shipped figures, for a GPU that has none
_SMALLEST = 512  # bytes of a fragment: the first entry of the native table
_MOST_MICROSECONDS = 1e12


@dataclass(frozen=True)
class CopyMethodCosts:
    """Predicted seconds of a transfer: start, and so much for each block and for each fragment.

    fragment: seconds by size in bytes, at least one size. In between they are interpolated in the
    logarithm of the size; above the largest size they grow with it, below the smallest they stay.
    """

    start: float
    block: float
    fragment: Mapping[int, float]

    def fragment_seconds(self, nbytes: int) -> float:
        sizes = sorted(self.fragment)
        if nbytes <= sizes[0]:
            return self.fragment[sizes[0]]
        if nbytes >= sizes[-1]:
            return self.fragment[sizes[-1]] * nbytes / sizes[-1]
        above = next(index for index, size in enumerate(sizes) if size > nbytes)
        low, high = sizes[above - 1], sizes[above]
        share = math.log2(nbytes / low) / math.log2(high / low)
        return self.fragment[low] * (1 - share) + self.fragment[high] * share

    def seconds(self, blocks: int, slabs: int, fragment_bytes: int) -> float:
        fragments = blocks * slabs * self.fragment_seconds(fragment_bytes)
        return self.start + blocks * self.block + fragments

    def native(self) -> abi.CopyMethodCosts:
        sizes = (_SMALLEST << power for power in range(abi.FRAGMENT_SIZES))
        table = (ctypes.c_double * abi.FRAGMENT_SIZES)(*map(self.fragment_seconds, sizes))
        return abi.CopyMethodCosts(self.start, self.block, table)

    @classmethod
    def from_json(cls, content: Mapping[str, Any], name: str = "costs") -> CopyMethodCosts:
        """The costs that to_json() has written.

        Args:
            name (str): where they are in the file, for errors.

        Raises:
            KeyError, TypeError, ValueError, AttributeError: they cannot be read.
        """
        start, block = (
            _read_microseconds(f"{name}.{field}", content[field]) / 1e6
            for field in ("start_us", "block_us")
        )
        fragment = {}
        for size, microseconds in content["fragment_us"].items():
            field = f"{name}.fragment_us.{size}"
            nbytes = read_int(f"the size of {field}", int(size), 1, INT64_MAX)
            fragment[nbytes] = _read_microseconds(field, microseconds) / 1e6
        if not fragment:
            raise ValueError(f"{name}.fragment_us needs at least one size, in bytes")
        return cls(start, block, fragment)

    def to_json(self) -> dict[str, Any]:
        return {
            "start_us": round(self.start * 1e6, 3),
            "block_us": round(self.block * 1e6, 4),
            "fragment_us": {
                str(size): round(seconds * 1e6, 4)
                for size, seconds in sorted(self.fragment.items())
            },
        }


Costs = dict[str, dict[str, CopyMethodCosts]]  # by direction, then by copy method


@dataclass(frozen=True)
class Figures:
    """The costs of all copy methods that were measured.

    Attributes:
        source (str): where they are from, for people.
        is_generic (bool): they are of another GPU than the one that was asked for.
    """

    costs: Costs
    source: str
    is_generic: bool = False


def read_figures(gpu: str) -> Figures:
    """The costs for a GPU, from the first of these that exists: the file that
    KVSWAP_COPY_METHOD_COSTS names, the user's cache, what is shipped for this GPU, what is shipped
    for GENERIC. A cache that cannot be read is skipped, with a warning in the log.

    Raises:
        ValueError: KVSWAP_COPY_METHOD_COSTS names a file that cannot be opened, or a file has no
            costs.
    """
    given = os.environ.get("KVSWAP_COPY_METHOD_COSTS")
    if given:
        try:
            content = Path(given).read_bytes()
        except OSError as error:
            raise _unreadable(Path(given), error) from error
        return Figures(_read(Path(given), content), given)
    try:
        cached = cache_file(gpu)
        content = cached.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        pass  # nothing was measured here
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home
        log.warning(
            "shipped costs of the copy methods are used, the cache cannot be read: %s", error
        )
    else:
        return Figures(_read(cached, content), str(cached))
    shipped = json.loads(SHIPPED.read_text())
    name = gpu if gpu in shipped else GENERIC
    return Figures(_parse(shipped[name]), f"{SHIPPED.name}, {name}", bool(gpu) and name != gpu)


def write_figures(gpu: str, costs: Costs) -> Path:
    """Keeps them in the cache, for every process from now on."""
    content = {
        direction: {
            copy_method: of_method.to_json() for copy_method, of_method in costs[direction].items()
        }
        for direction in DIRECTIONS
    }
    file = cache_file(gpu)
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(f".{os.getpid()}")
    try:
        part.write_text(json.dumps(content, indent=1) + "\n")
        part.rename(file)  # at once: another process may read it
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    return file


def cache_file(gpu: str) -> Path:
    """Of this GPU and this driver, in XDG_CACHE_HOME. Raises RuntimeError when there is no home."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    name = re.sub(r"[^A-Za-z0-9]+", "-", gpu)
    driver = loader.library().kvswap_driver_version()
    return folder / "torch_kvswap" / f"copy-method-costs-{name}-{driver}.json"


def _read(file: Path, content: bytes) -> Costs:
    try:
        return _parse(json.loads(content))
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise _unreadable(file, error) from error


def _unreadable(file: Path, error: Exception) -> ValueError:
    return ValueError(
        f"the costs of the copy methods cannot be read from {file}: {type(error).__name__}: "
        f"{error}; remove it; `python -m torch_kvswap calibrate` writes another one"
    )


def _parse(content: Mapping[str, Any]) -> Costs:
    return {
        direction: {
            copy_method: CopyMethodCosts.from_json(of_method, f"{direction}.{copy_method}")
            for copy_method, of_method in content[direction].items()
        }
        for direction in DIRECTIONS
    }


def _read_microseconds(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} is a {type(value).__name__}; it must be a number of microseconds")
    if not 0 <= value <= _MOST_MICROSECONDS:  # nor is NaN
        raise ValueError(f"{name} is {value}; it must be 0 to {_MOST_MICROSECONDS:g} microseconds")
    return float(value)


AUTO = "auto"
CHOICES = (AUTO, "batch", "strided", "staged", "kernel")
_UNKNOWN = -1.0  # seconds


def copy_method_options(
    copy_method: str | None, staging_bytes: int, device: torch.device
) -> abi.CopyMethodOptions:
    """The choice of a copy method, for a native handler.

    Args:
        copy_method (str | None): one of CHOICES; None reads KVSWAP_COPY_METHOD, "auto" by default.
        staging_bytes (int): GPU memory for staged copies.
        device (torch.device): of the cache.

    Raises:
        ValueError: there is no such method, or the costs cannot be read.
    """
    name = "copy_method" if copy_method is not None else "KVSWAP_COPY_METHOD"
    copy_method = (
        copy_method if copy_method is not None else os.environ.get("KVSWAP_COPY_METHOD") or AUTO
    )
    if copy_method not in CHOICES:
        raise ValueError(f"{name}={copy_method!r}; expected one of {', '.join(CHOICES)}")
    options = abi.CopyMethodOptions()
    options.copy_method = -1 if copy_method == AUTO else COPY_METHODS.index(copy_method)
    options.staging_bytes = read_int("staging_bytes", staging_bytes)
    figures = None if device.type == "cpu" else figures_of(device)
    if figures is not None and figures.is_generic and copy_method == AUTO:
        warn_once(
            f"the copy method is chosen by figures of an {GENERIC}: there are none of this GPU; "
            "`python -m torch_kvswap calibrate` measures it"
        )
    for direction, costs in zip(DIRECTIONS, options.costs, strict=True):
        for number, of_method in enumerate(COPY_METHODS):
            found = figures.costs[direction].get(of_method) if figures else None
            costs[number] = found.native() if found else abi.CopyMethodCosts(_UNKNOWN)
    return options


def figures_of(device: torch.device) -> Figures:
    """The costs for the GPU of a cache."""
    return read_figures(torch.cuda.get_device_name(device) if torch.cuda.is_available() else "")
