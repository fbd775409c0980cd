"""Times the calls of store() and load() alone, by blocks and by layers.

Beside them the calls of one big copy of the same bytes, and of the reference R. All three in turn,
warm and cold, as in bandwidth.py. "held": as warm, but the caller's stream is busy, so the transfer
begins only after the call. Without a GPU nothing is held, and the calls copy too.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # a checkout need not be installed

from comparison import (
    BIG,
    COLD,
    HELD,
    OURS,
    REFERENCE,
    SUBMIT,
    WARM,
    Cell,
    Samples,
    by_kind,
    comparison_parser,
    finish_cells,
    measure_all,
    plan_of,
)
from report import Column, table_of

SHAPES = ("1x8", "160x8")
CAPTION = "host time in the call, us; R: what PyTorch needs for one copy with the same guarantees"
Row = tuple[Cell, str, Samples]  # of a state


def main(arguments: list[str]) -> int:
    options = comparison_parser(__doc__, samples=50, cold_samples=10).parse_args(arguments)
    states = (WARM, HELD, COLD) if options.device == "cuda" else (WARM, COLD)
    cells = measure_all(plan_of(options, states, SHAPES), options)
    print(tables(cells), "", sep="\n")
    return finish_cells(options, "submit_cost", cells)


def tables(cells: Sequence[Cell]) -> str:
    """One for each arrangement and direction; a row for each shape, number of blocks and state."""
    said = [CAPTION]
    for title, chosen in by_kind(cells):
        rows = [(cell, *state) for cell in chosen for state in cell.states.items()]
        said.append(table_of(_columns(title), rows))
    return "\n\n".join(said)


def _columns(title: str) -> list[Column[Row]]:
    return [
        Column(title, lambda row: str(row[0].kind.shape)),
        Column("blocks", lambda row: row[0].kind.blocks),
        Column("state", lambda row: row[1]),
        Column("median", lambda row: row[2].median(OURS, SUBMIT)),
        Column("big copy", lambda row: row[2].median(BIG, SUBMIT)),
        Column("R", lambda row: row[2].median(REFERENCE, SUBMIT)),
        Column("median / R", lambda row: row[2].ratio(OURS, REFERENCE, SUBMIT)),
    ]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
