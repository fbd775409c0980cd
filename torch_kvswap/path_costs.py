"""What the ways of copying cost: figures that were measured, and where they are kept."""

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

from torch_kvswap import _extension, capi

DIRECTIONS = ("store", "load")
SHIPPED = Path(__file__).with_suffix(".json")
GENERIC = "NVIDIA H200"  # of the shipped figures, for a GPU that has none
_SMALLEST = 512  # bytes of a fragment: the first entry of the native table


@dataclass(frozen=True)
class PathCosts:
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

    def seconds(self, blocks: int, planes: int, fragment_bytes: int) -> float:
        fragments = blocks * planes * self.fragment_seconds(fragment_bytes)
        return self.start + blocks * self.block + fragments

    def native(self) -> capi.PathCosts:
        sizes = (_SMALLEST << power for power in range(capi.FRAGMENT_SIZES))
        table = (ctypes.c_double * capi.FRAGMENT_SIZES)(*map(self.fragment_seconds, sizes))
        return capi.PathCosts(self.start, self.block, table)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> PathCosts:
        fragment = {int(size): float(us) / 1e6 for size, us in content["fragment_us"].items()}
        if not fragment or min(fragment) < 1:
            raise ValueError("fragment_us needs at least one size, in bytes")
        return cls(float(content["start_us"]) / 1e6, float(content["block_us"]) / 1e6, fragment)

    def to_json(self) -> dict[str, Any]:
        return {
            "start_us": round(self.start * 1e6, 3),
            "block_us": round(self.block * 1e6, 4),
            "fragment_us": {
                str(size): round(seconds * 1e6, 4)
                for size, seconds in sorted(self.fragment.items())
            },
        }


Costs = dict[str, dict[str, PathCosts]]  # by direction, then by path


@dataclass(frozen=True)
class Figures:
    """The costs of all paths that were measured, and where they are from, for people."""

    costs: Costs
    source: str


def read_figures(gpu: str) -> Figures:
    """Those of KVSWAP_PATH_COSTS, else of the cache, else those shipped for this GPU, else for
    GENERIC. Raises ValueError, naming the file, for one that cannot be read."""
    given = os.environ.get("KVSWAP_PATH_COSTS")
    if given:
        return Figures(_read(Path(given)), given)
    cached = cache_file(gpu)
    if cached.exists():
        return Figures(_read(cached), str(cached))
    shipped = json.loads(SHIPPED.read_text())
    name = gpu if gpu in shipped else GENERIC
    return Figures(_parse(shipped[name]), f"{SHIPPED.name}, {name}")


def write_figures(gpu: str, costs: Costs) -> Path:
    """Keeps them in the cache, for every process from now on."""
    content = {
        direction: {path: of_path.to_json() for path, of_path in costs[direction].items()}
        for direction in DIRECTIONS
    }
    file = cache_file(gpu)
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(f".{os.getpid()}")
    part.write_text(json.dumps(content, indent=1) + "\n")
    part.rename(file)  # at once: another process may read it
    return file


def cache_file(gpu: str) -> Path:
    """Of this GPU and this driver, in XDG_CACHE_HOME."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    name = re.sub(r"[^A-Za-z0-9]+", "-", gpu)
    driver = _extension.library().kvswap_driver_version()
    return folder / "torch_kvswap" / f"path-costs-{name}-{driver}.json"


def _read(file: Path) -> Costs:
    try:
        return _parse(json.loads(file.read_text()))
    except (OSError, KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(
            f"the costs of the paths cannot be read from {file}: {type(error).__name__}: {error}; "
            "remove it, or let `python -m torch_kvswap calibrate` write it anew"
        ) from error


def _parse(content: Mapping[str, Any]) -> Costs:
    return {
        direction: {path: PathCosts.from_json(of) for path, of in content[direction].items()}
        for direction in DIRECTIONS
    }
