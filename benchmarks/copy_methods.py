"""Compares the copy method that a handler chooses for scattered blocks with each forced method.

Total time is from the call of store() or load() until handler.synchronize() returns. Each round
copies once with each method, and beside them one big copy and the reference of bandwidth.py, in
changing order, warm and cold. "copy_engines" chooses without kernels. This or a forced method, if
it takes more than twice as long as the best in the first rounds, is left out of the others, and of
the cold ones. All handlers share a cache and a pool, whose bytes are compared after each cell.
Without a GPU no method can be forced.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # a checkout need not be installed

import comparison
import torch
from big_copy import Before
from blocks import NumberedBlocks
from comparison import (
    BIG,
    COLD,
    REFERENCE,
    WARM,
    Comparison,
    Timed,
    by_kind,
    comparison_parser,
    finish_cells,
    measure_kinds,
    plan_of,
)
from report import Column, table_of
from timing import Move
from transfers import Kind, Shape, move, open_handlers

from torch_kvswap import OffloadHandler
from torch_kvswap.copy_method import AUTO, COPY_ENGINES

STATES = (WARM, COLD)
FIRST = 2  # samples after which SLOW decides
SLOW, MUCH_SLOWER = 2.0, 10.0  # over the best: no candidate for it; not even worth FIRST samples
COPIES = (BIG, REFERENCE)
FORCED = ("strided", "batch", "staged", "kernel")
# The blocks, the handlers by copy_method, and the reasons why other methods have no handler.
Methods = tuple[NumberedBlocks, dict[str, OffloadHandler], dict[str, str]]


def main(arguments: list[str]) -> int:
    options = comparison_parser(__doc__, samples=10, cold_samples=5).parse_args(arguments)
    plan = plan_of(options, STATES)
    cells = measure_kinds(plan, options, open_methods, measure)
    print(tables(cells), "", sep="\n")
    return finish_cells(options, "copy_methods", cells)


@dataclass
class Cell(comparison.Cell):
    """Transfers of one kind by each method. refused: why another method has no handler."""

    refused: dict[str, str] = field(default_factory=dict)

    def ratios(self, state: str) -> dict[str, float]:
        """Of the automatic method over each forced one: medians over the rounds of both."""
        samples = self.states[state]
        return {
            name: samples.ratio(AUTO, name)
            for name, moves in samples.moves.items()
            if moves and name in FORCED
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


def open_methods(
    device: torch.device, shape: Shape, arrangement: str, count: int, stack: ExitStack
) -> Methods:
    blocks = shape.new_blocks(device, count, arrangement)
    stack.enter_context(blocks.host)
    return blocks, *open_handlers(blocks, (AUTO, COPY_ENGINES, *FORCED), stack)


def measure(compared: Comparison, methods: Methods, kind: Kind) -> Cell:
    def moved(handler: Any, before: Before) -> Move:
        return move(handler, blocks, kind.directions, kind.blocks, before)

    blocks, ours, refused = methods
    blocks.refill()
    cell = Cell(kind, refused=dict(refused))
    ways: dict[str, Timed] = {name: partial(moved, handler) for name, handler in ours.items()}
    ways.update(compared.copies(kind))
    for state in STATES:
        cell.states[state] = samples = compared.run(ways, kind, state, candidates)
        ways = {name: ways[name] for name in samples.complete}
    cell.wrong = blocks.wrong()
    return cell


def candidates(number: int, moves: Mapping[str, Sequence[Move]]) -> list[str]:
    """After that round: all but the methods that cannot be the best."""
    best = {name: min(move.total_us for move in of_way) for name, of_way in moves.items()}
    least = min(us for name, us in best.items() if name not in COPIES)
    times = SLOW if number >= FIRST - 1 else MUCH_SLOWER
    return [name for name, us in best.items() if name in (AUTO, *COPIES) or us <= times * least]


def tables(cells: Sequence[Cell]) -> str:
    """A row for each shape, number of blocks and state; what was refused below."""
    refused = dict.fromkeys(item for cell in cells for item in cell.refused.items())
    said = []
    for title, chosen in by_kind(cells):
        rows = [(cell, state) for cell in chosen for state in cell.states]
        said.append(table_of(_columns(title, chosen), rows))
    if refused:
        said.append("\n".join(f"no handler with {name}: {why}" for name, why in refused))
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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
