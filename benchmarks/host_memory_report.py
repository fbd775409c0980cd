"""What making host memory comes to: tables, and the target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import mean, median
from typing import Any

import numpy as np
from report import Column, Verdict, table_of
from timing import summary

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
        parts = {name: summary(getattr(self, name)) for name in ("ready", "free", "resident")}
        sizes = {"name": self.name, "nbytes": self.nbytes, "huge_share": self.huge_share}
        return {**sizes, **parts, "wrong": self.wrong}


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
        steps = {"alone_us": self.alone_us, "during_us": self.during_us}
        figures = {
            name: {**summary(us), "p99": round(float(np.percentile(us, 99)), 4)}
            for name, us in steps.items()
        }
        return {**figures, "seconds": self.seconds, "lost": self.lost}


CELLS: list[Column[Cell]] = [
    Column("memory", lambda cell: cell.name),
    Column("GiB", lambda cell: cell.nbytes / 2**30),
    Column("ready, s", lambda cell: median(cell.ready)),
    Column("s per GiB", lambda cell: cell.per_gib(cell.ready)),
    Column("free, s per GiB", lambda cell: cell.per_gib(cell.free)),
    Column("resident share", lambda cell: median(cell.resident) / cell.nbytes),
    Column("huge share", lambda cell: cell.huge_share),
]
STEPS: list[Column[tuple[str, list[float]]]] = [
    Column("compute", lambda steps: steps[0]),
    Column("steps", lambda steps: len(steps[1])),
    Column("median, us", lambda steps: median(steps[1])),
    Column("p99, us", lambda steps: float(np.percentile(steps[1], 99))),
]


def tables(cells: Sequence[Cell], beside: Beside) -> str:
    steps = table_of(STEPS, [("alone", beside.alone_us), ("while pinned", beside.during_us)])
    lost = f"compute lost in the {beside.seconds:.2f} s: {beside.lost:.1%}"
    return f"{table_of(CELLS, cells)}\n\n{steps}\n{lost}"


def judge(cells: Sequence[Cell]) -> list[Verdict]:
    """The first is torch's."""
    first = median(cells[0].ready)
    return [
        Verdict(f"{cell.name}, time until ready over torch's", SHARE, median(cell.ready) / first)
        for cell in cells
        if cell.name == JUDGED
    ]
