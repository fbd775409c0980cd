"""What moving scattered blocks comes to: a table for each direction, and the targets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from peers import best_peer
from report import Verdict, table
from transfers import Kind, Move

# By blocks in a transfer. Of the total time over that of one big copy, for fragments of 8 KiB and
# more and for smaller ones; a single block may take EXTRA_US more instead. Of the submitting call.
RATIOS = {8: (1.15, 1.22), 64: (1.05, 1.08), 512: (1.02, 1.05)}
EXTRA_US = 12.0
SUBMIT_US = {1: 20.0, 8: 35.0, 64: 60.0, 512: 100.0}
TOTAL, SUBMIT, PEER = "total over big copy", "submit in us", "total over big copy, best peer's"


@dataclass
class Cell:
    """Transfers of one kind, each beside a big copy of as many bytes, in microseconds. link_us: on
    the device alone, ours and the big copy's."""

    kind: Kind
    total_us: list[float] = field(default_factory=list)
    big_us: list[float] = field(default_factory=list)
    submit_us: list[float] = field(default_factory=list)
    link_us: list[tuple[float, float]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    wrong: int = 0  # blocks and pages

    def add(self, moved: Move, big_us: float) -> None:
        self.total_us.append(moved.total_us)
        self.big_us.append(big_us)
        self.submit_us.append(moved.submit_us)
        self.paths = sorted({*self.paths, moved.copy_method})

    def add_link(self, pair: tuple[float, float] | None) -> None:
        self.link_us += [pair] if pair else []

    @property
    def ratio(self) -> float:
        return median(ours / big for ours, big in zip(self.total_us, self.big_us, strict=True))

    @property
    def link_ratio(self) -> float | None:
        return median(ours / big for ours, big in self.link_us) if self.link_us else None

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
    def verdicts(self) -> dict[str, Verdict]:
        """By what they are on; the last one only where there is a figure of a peer."""
        targets = {TOTAL: self.ratio_target, SUBMIT: SUBMIT_US[self.kind.blocks]}
        peer = best_peer(self.kind)
        targets |= {} if peer is None else {PEER: peer}
        return {
            what: Verdict(
                f"{self.kind}, {what}", target, self.submit if what == SUBMIT else self.ratio
            )
            for what, target in targets.items()
        }

    def to_json(self) -> dict[str, Any]:
        figures = asdict(self)
        medians = {
            "ratio": self.ratio,
            "ratio_target": self.ratio_target,
            "link_ratio": self.link_ratio,
            "submit": self.submit,
        }
        return {**figures.pop("kind"), **medians, **figures}


def tables(cells: Sequence[Cell], big: str, judged: bool) -> str:
    """big: what the ratios are to. judged: whether the targets are shown."""
    directions = dict.fromkeys(cell.kind.direction for cell in cells)
    caption = f"ratio: total time / {big}; link: on the device alone; submit: host time in the call"
    caption += "; in brackets at most, ! is a miss" if judged else ""
    return "\n\n".join([caption, *(_of_direction(cells, name, judged) for name in directions)])


def _of_direction(cells: Sequence[Cell], direction: str, judged: bool) -> str:
    chosen = [cell for cell in cells if cell.kind.direction == direction]
    found = {(cell.kind.shape, cell.kind.blocks): cell for cell in chosen}
    counts = list(dict.fromkeys(blocks for _, blocks in found))
    headers = [direction]
    for blocks in counts:
        headers += [f"{blocks} block{'s' * (blocks > 1)}: ratio", "link", "submit, us", "path"]
    rows = []
    for shape in dict.fromkeys(shape for shape, _ in found):
        row: list[object] = [str(shape)]
        for blocks in counts:
            cell = found[shape, blocks]
            ratio, submit = (_text(cell.verdicts[what], judged) for what in (TOTAL, SUBMIT))
            row += [ratio, cell.link_ratio, submit, "/".join(cell.paths)]
        rows.append(row)
    return table(headers, rows)


def _text(verdict: Verdict, judged: bool) -> str:
    if not judged:
        return f"{verdict.measured:.2f}"
    miss = "" if verdict.met else " !"
    return f"{verdict.measured:.2f} ({verdict.target:.2f}){miss}"


def judge(cells: Sequence[Cell]) -> list[Verdict]:
    return [verdict for cell in cells for verdict in cell.verdicts.values()]


def counts(cells: Sequence[Cell]) -> str:
    """Of the targets of each kind that are met and missed."""
    lines = []
    for what in (TOTAL, SUBMIT, PEER):
        met = [cell.verdicts[what].met for cell in cells if what in cell.verdicts]
        lines += [f"{what}: {sum(map(bool, met))} met, {met.count(False)} missed"] if met else []
    return "\n".join(lines)
