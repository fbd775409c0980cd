"""What making host memory comes to: tables, and the target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import mean, median
from typing import Any

import numpy as np
from report import Verdict, table

SHARE = 0.25  # of torch's time
JUDGED = "HostPool"


@dataclass
class Cell:
    """Samples of one way to make nbytes. ready, free: seconds; resident: bytes of the process more
    than before; huge: of them on huge pages, None where nobody says."""

    name: str
    nbytes: int
    ready: list[float] = field(default_factory=list)
    free: list[float] = field(default_factory=list)
    resident: list[int] = field(default_factory=list)
    huge: list[int | None] = field(default_factory=list)
    wrong: int = 0  # memory that was not zero

    def add(self, ready: float, free: float, resident: int, huge: int | None) -> None:
        self.ready.append(ready)
        self.free.append(free)
        self.resident.append(resident)
        self.huge.append(huge)

    def per_gib(self, seconds: Sequence[float]) -> float:
        return median(seconds) / self.nbytes * 2**30

    @property
    def huge_share(self) -> float | None:
        last = self.huge[-1]
        return None if last is None else last / self.nbytes

    def to_json(self) -> dict[str, Any]:
        return vars(self)


@dataclass
class Beside:
    """Steps of compute in microseconds, alone and while memory was made, which took `seconds`."""

    alone_us: list[float]
    during_us: list[float]
    seconds: float

    @property
    def lost(self) -> float:
        """The share of the compute that was lost meanwhile."""
        return 1 - mean(self.alone_us) / mean(self.during_us)

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "lost": self.lost}


def tables(cells: Sequence[Cell], beside: Beside) -> str:
    rows = [
        [
            cell.name,
            median(cell.ready),
            cell.per_gib(cell.ready),
            cell.per_gib(cell.free),
            median(cell.resident) / cell.nbytes,
            cell.huge_share,
        ]
        for cell in cells
    ]
    size = f"{cells[0].nbytes / 2**30:g} GiB"
    headers = [size, "ready, s", "s per GiB", "free, s per GiB", "resident share", "huge share"]
    steps = [
        [name, len(taken), median(taken), float(np.percentile(taken, 99))]
        for name, taken in (("alone", beside.alone_us), ("while pinned", beside.during_us))
    ]
    return "\n".join(
        [
            table(headers, rows),
            "",
            table(["compute", "steps", "median, us", "p99, us"], steps),
            f"compute lost in the {beside.seconds:.2f} s: {beside.lost:.1%}",
        ]
    )


def judge(cells: Sequence[Cell]) -> list[Verdict]:
    """The first is torch's."""
    first = median(cells[0].ready)
    return [
        Verdict(f"{cell.name}, time until ready over torch's", SHARE, median(cell.ready) / first)
        for cell in cells
        if cell.name == JUDGED
    ]
