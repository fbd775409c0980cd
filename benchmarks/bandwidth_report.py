"""What moving scattered blocks comes to: a table for each direction, and the targets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from report import Verdict, table
from transfers import Kind

# By blocks in a transfer. Of the total time over that of one big copy, for fragments of 8 KiB and
# more and for smaller ones; a single block may take EXTRA_US more instead. Of the submitting call.
RATIOS = {8: (1.15, 1.22), 64: (1.05, 1.08), 512: (1.02, 1.05)}
EXTRA_US = 12.0
SUBMIT_US = {1: 20.0, 8: 35.0, 64: 60.0, 512: 100.0}


@dataclass(frozen=True)
class Cell:
    """Transfers of one kind, each beside a big copy of as many bytes. Times in microseconds."""

    kind: Kind
    total_us: list[float]
    big_us: list[float]
    submit_us: list[float]
    copy_us: list[float]  # of total_us, on the device
    paths: list[str]
    wrong: int  # blocks and pages

    @property
    def ratio(self) -> float:
        return median(ours / big for ours, big in zip(self.total_us, self.big_us, strict=True))

    @property
    def ratio_target(self) -> float:
        if self.kind.blocks == 1:
            big = median(self.big_us)
            return (big + EXTRA_US) / big
        return RATIOS[self.kind.blocks][self.kind.shape.fragment_kib < 8]

    @property
    def submit(self) -> float:
        return median(self.submit_us)

    @property
    def verdicts(self) -> tuple[Verdict, Verdict]:
        return (
            Verdict(f"{self.kind}, total over big copy", self.ratio_target, self.ratio),
            Verdict(f"{self.kind}, submit in us", SUBMIT_US[self.kind.blocks], self.submit),
        )

    def to_json(self) -> dict[str, Any]:
        figures = asdict(self)
        medians = {"ratio": self.ratio, "ratio_target": self.ratio_target, "submit": self.submit}
        return {**figures.pop("kind"), **medians, **figures}


def tables(cells: Sequence[Cell], big: str, judged: bool) -> str:
    """big: what the ratios are to. judged: whether the targets are shown."""
    directions = dict.fromkeys(cell.kind.direction for cell in cells)
    caption = f"ratio: total time / {big}; submit: host time in the call"
    caption += "; in brackets at most, ! is a miss" if judged else ""
    return "\n\n".join([caption, *(_of_direction(cells, name, judged) for name in directions)])


def _of_direction(cells: Sequence[Cell], direction: str, judged: bool) -> str:
    chosen = [cell for cell in cells if cell.kind.direction == direction]
    found = {(cell.kind.shape, cell.kind.blocks): cell for cell in chosen}
    counts = list(dict.fromkeys(blocks for _, blocks in found))
    headers = [direction]
    for blocks in counts:
        headers += [f"{blocks} block{'s' * (blocks > 1)}: ratio", "submit, us", "path"]
    rows = []
    for shape in dict.fromkeys(shape for shape, _ in found):
        row = [str(shape)]
        for blocks in counts:
            cell = found[shape, blocks]
            row += [*(_text(verdict, judged) for verdict in cell.verdicts), "/".join(cell.paths)]
        rows.append(row)
    return table(headers, rows)


def _text(verdict: Verdict, judged: bool) -> str:
    if not judged:
        return f"{verdict.measured:.2f}"
    miss = "" if verdict.met else " !"
    return f"{verdict.measured:.2f} ({verdict.target:.2f}){miss}"


def judge(cells: Sequence[Cell]) -> list[Verdict]:
    return [verdict for cell in cells for verdict in cell.verdicts]


def counts(cells: Sequence[Cell]) -> str:
    """Of the targets of each kind that are met and missed."""
    lines = []
    for number, name in enumerate(("total over big copy", "submit")):
        met = [bool(cell.verdicts[number].met) for cell in cells]
        lines.append(f"{name}: {sum(met)} met, {len(met) - sum(met)} missed")
    return "\n".join(lines)
