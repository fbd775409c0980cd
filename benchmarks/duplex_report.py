"""What moving both ways at once comes to: a table, and the target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from report import Verdict, table
from transfers import Move, Shape

SHARE = 0.93  # of two big copies at once


@dataclass
class Cell:
    """Pairs of a store and a load at once, and of two big copies of as many bytes at once, in
    microseconds. link: on the device alone, ours and the big copies'."""

    shape: Shape
    blocks: int  # each way
    total_us: list[float] = field(default_factory=list)
    big_us: list[float] = field(default_factory=list)
    link_us: list[tuple[float, float]] = field(default_factory=list)
    paths: set[str] = field(default_factory=set)
    wrong: int = 0  # blocks and pages

    def add(self, moved: Move, big_us: float, link: tuple[float, float] | None) -> None:
        self.total_us.append(moved.total_us)
        self.big_us.append(big_us)
        self.link_us += [link] if link else []
        self.paths.add(moved.copy_method)

    @property
    def share(self) -> float:
        """The time of two big copies at once over ours."""
        return median(big / ours for ours, big in zip(self.total_us, self.big_us, strict=True))

    @property
    def link_share(self) -> float | None:
        return median(big / ours for ours, big in self.link_us) if self.link_us else None

    def gb_per_s(self, us: Sequence[float]) -> float:
        """Of both directions together, in 1e9 bytes."""
        return 2 * self.blocks * self.shape.block_bytes / median(us) / 1e3

    def to_json(self) -> dict[str, Any]:
        return {
            "shape": vars(self.shape),
            "blocks": self.blocks,
            "share": self.share,
            "link_share": self.link_share,
            "total_us": self.total_us,
            "big_us": self.big_us,
            "link_us": self.link_us,
            "paths": sorted(self.paths),
            "wrong": self.wrong,
        }


def table_of(cells: Sequence[Cell]) -> str:
    headers = ["both at once", "blocks", "big copies, GB/s", "ours, GB/s", "share", "link share"]
    rows = []
    for cell in cells:
        speeds = [cell.gb_per_s(cell.big_us), cell.gb_per_s(cell.total_us)]
        shares = [cell.share, cell.link_share, "/".join(sorted(cell.paths))]
        rows.append([str(cell.shape), cell.blocks, *speeds, *shares])
    return table([*headers, "path"], rows)


def judge(cells: Sequence[Cell]) -> list[Verdict]:
    return [
        Verdict(
            f"both at once, {cell.blocks} x ({cell.shape}), share of two big copies",
            SHARE,
            cell.share,
            at_least=True,
        )
        for cell in cells
    ]
