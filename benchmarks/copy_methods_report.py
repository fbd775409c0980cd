"""How far the chosen copy method is from the best forced one: tables, and the targets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import comparison
from comparison import BIG, REFERENCE
from report import Column, Verdict, table_of
from timing import Move

from torch_kvswap.copy_method import AUTO

RATIO = 1.05  # of the automatic method over the best forced one
FIRST = 2  # samples after which SLOW decides
SLOW, MUCH_SLOWER = 2.0, 10.0  # over the best: no candidate for it; not even worth FIRST samples
COPIES = (BIG, REFERENCE)
COPY_ENGINES_ONLY, EXPEDITED = "copy engines only", "expedited"
NOT_FORCED = (AUTO, COPY_ENGINES_ONLY, EXPEDITED, *COPIES)


def candidates(number: int, moves: Mapping[str, Sequence[Move]]) -> list[str]:
    """After that round: all but the forced methods and options that cannot be the best."""
    best = {name: min(move.total_us for move in of_way) for name, of_way in moves.items()}
    least = min(us for name, us in best.items() if name not in COPIES)
    times = SLOW if number >= FIRST - 1 else MUCH_SLOWER
    return [name for name, us in best.items() if name in (AUTO, *COPIES) or us <= times * least]


@dataclass
class Cell(comparison.Cell):
    """Transfers of one kind by each method. refused: why a method cannot be had."""

    refused: dict[str, str] = field(default_factory=dict)

    def ratios(self, state: str) -> dict[str, float]:
        """Of the automatic method over each forced one: medians over the rounds of both."""
        samples = self.states[state]
        return {
            name: samples.ratio(AUTO, name)
            for name, moves in samples.moves.items()
            if moves and name not in NOT_FORCED
        }

    def ratio(self, state: str) -> float | None:
        """Over the best forced method; None when no method can be forced."""
        return max(self.ratios(state).values(), default=None)

    def best(self, state: str) -> str | None:
        ratios = self.ratios(state)
        return max(ratios, key=ratios.__getitem__, default=None)

    def to_json(self) -> dict[str, Any]:
        states = self.states
        found = {state: {"ratio": self.ratio(state), "best": self.best(state)} for state in states}
        return {**super().to_json(), "refused": self.refused, "auto over best forced": found}


def tables(cells: Sequence[Cell]) -> str:
    """A row for each shape, number of blocks and state; what was refused below."""
    kinds = dict.fromkeys((cell.kind.arrangement, cell.kind.direction) for cell in cells)
    refused = dict.fromkeys(item for cell in cells for item in cell.refused.items())
    said = []
    for kind in kinds:
        chosen = [cell for cell in cells if (cell.kind.arrangement, cell.kind.direction) == kind]
        rows = [(cell, state) for cell in chosen for state in cell.states]
        said.append(table_of(_columns(", ".join(kind), chosen), rows))
    said += ["\n".join(f"{name} cannot be had: {why}" for name, why in refused)] if refused else []
    return "\n\n".join(said)


def _columns(title: str, cells: Sequence[Cell]) -> list[Column[tuple[Cell, str]]]:
    """Of a cell and a state."""

    def time_of(way: str) -> Callable[[tuple[Cell, str]], object]:
        def median_us(row: tuple[Cell, str]) -> float | None:
            samples = row[0].states[row[1]]
            return samples.median(way) if samples.moves.get(way) else None

        return median_us

    ways = dict.fromkeys(way for cell in cells for one in cell.states.values() for way in one.moves)
    return [
        Column(f"{title}, us", lambda row: str(row[0].kind.shape)),
        Column("blocks", lambda row: row[0].kind.blocks),
        Column("state", lambda row: row[1]),
        *(Column(way, time_of(way)) for way in ways),
        Column("chosen", lambda row: "/".join(row[0].states[row[1]].copy_methods[AUTO])),
        Column("best", lambda row: row[0].best(row[1])),
        Column("auto / best", lambda row: row[0].ratio(row[1])),
    ]


def judge(cells: Sequence[Cell]) -> list[Verdict]:
    return [
        Verdict(
            f"{cell.kind}, {state}, automatic method over the best forced one",
            RATIO,
            cell.ratio(state),
        )
        for cell in cells
        for state in cell.states
    ]
