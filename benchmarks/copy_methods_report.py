"""How far the chosen path is from the best forced one: a table for each direction, the targets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from report import Verdict, table
from transfers import Kind

from torch_kvswap.copy_method import AUTO

RATIO = 1.05  # of the automatic path over the best forced one
SLOW = 2.0  # over the best: no candidate for it


@dataclass
class Cell:
    """Transfers of one kind by each path, in microseconds. used: the paths that the results name.
    refused: why a path cannot be had."""

    kind: Kind
    total_us: dict[str, list[float]]
    refused: dict[str, str] = field(default_factory=dict)
    used: dict[str, list[str]] = field(default_factory=dict)
    wrong: int = 0  # blocks and pages

    def add(self, name: str, total_us: float, path: str) -> None:
        self.total_us[name].append(total_us)
        self.used[name] = sorted({*self.used.get(name, ()), path})

    def worth_while(self) -> list[str]:
        """The automatic path, and all that may be the best."""
        best = min(map(min, self.total_us.values()))
        return [
            name
            for name, times in self.total_us.items()
            if name == AUTO or min(times) <= SLOW * best
        ]

    @property
    def ratios(self) -> dict[str, float]:
        """Of the automatic path over each forced one: medians over the samples of both."""
        ours = self.total_us[AUTO]
        return {
            name: median(mine / forced for mine, forced in zip(ours, times, strict=False))
            for name, times in self.total_us.items()
            if name != AUTO
        }

    @property
    def ratio(self) -> float | None:
        """Over the best forced path; None when no path can be forced."""
        return max(self.ratios.values(), default=None)

    @property
    def best(self) -> str | None:
        return max(self.ratios, key=self.ratios.__getitem__, default=None)

    def to_json(self) -> dict[str, Any]:
        return {
            **asdict(self.kind),
            "ratio": self.ratio,
            "best": self.best,
            "used": self.used,
            "ratios": self.ratios,
            "total_us": self.total_us,
            "refused": self.refused,
            "wrong": self.wrong,
        }


def tables(cells: Sequence[Cell]) -> str:
    """A row for each shape and number of blocks; what was refused below."""
    directions = dict.fromkeys(cell.kind.direction for cell in cells)
    refused = dict.fromkeys(item for cell in cells for item in cell.refused.items())
    said = [_of_direction(cells, name) for name in directions]
    said += ["\n".join(f"{path} cannot be had: {why}" for path, why in refused)] if refused else []
    return "\n\n".join(said)


def _of_direction(cells: Sequence[Cell], direction: str) -> str:
    chosen = [cell for cell in cells if cell.kind.direction == direction]
    forced = list(dict.fromkeys(name for cell in chosen for name in cell.ratios))
    headers = [f"{direction}, us", "blocks", AUTO, *forced, "chosen", "best", "auto / best"]
    rows = []
    for cell in chosen:
        times = [
            median(cell.total_us[name]) if cell.total_us.get(name) else None
            for name in (AUTO, *forced)
        ]
        ends = ["/".join(cell.used[AUTO]), cell.best, cell.ratio]
        rows.append([str(cell.kind.shape), cell.kind.blocks, *times, *ends])
    return table(headers, rows)


def judge(cells: Sequence[Cell]) -> list[Verdict]:
    return [
        Verdict(f"{cell.kind}, automatic path over the best forced one", RATIO, cell.ratio)
        for cell in cells
    ]
