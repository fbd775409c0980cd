"""Moves scattered blocks, beside one big copy of their bytes and beside what PyTorch needs for it.

Total time runs from the call of store() or load() until handler.synchronize() returns; that of the
big copy, pinned, from the call until the host sees its event. The reference R is one contiguous
copy by PyTorch with the guarantees of a transfer: an event on the current stream for which a copy
stream waits, an event, the copy, an event; then the host waits. All three in turn, in changing
order. "Warm": nothing else runs. "Cold": before each of them, host memory is read and PyTorch is
called, as a server does.

Blocks and pages: other random ids, as lists, in every transfer. Without a GPU all copies are of
PyTorch, and there are fewer and smaller shapes. All bytes are compared after each cell.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # a checkout need not be installed

from comparison import (
    BIG,
    COLD,
    OURS,
    REFERENCE,
    SUBMIT,
    TOTAL,
    WARM,
    Cell,
    by_kind,
    comparison_parser,
    finish_cells,
    measure_all,
    plan_of,
)
from report import Column, table_of

CAPTION = (
    "R: what PyTorch needs for one contiguous copy with the same guarantees; medians, [quartiles]"
)


def main(arguments: list[str]) -> int:
    options = comparison_parser(__doc__, samples=20, cold_samples=10).parse_args(arguments)
    cells = measure_all(plan_of(options, (WARM, COLD)), options)
    print(tables(cells), "", sep="\n")
    return finish_cells(options, "bandwidth", cells)


def tables(cells: Sequence[Cell]) -> str:
    """One for each arrangement and direction; a row for each shape and number of blocks."""
    said = [table_of(_columns(title, of[0]), of) for title, of in by_kind(cells)]
    return "\n\n".join([CAPTION, *said])


def _columns(title: str, first: Cell) -> list[Column[Cell]]:
    columns: list[Column[Cell]] = [
        Column(title, lambda cell: str(cell.kind.shape)),
        Column("blocks", lambda cell: cell.kind.blocks),
    ]
    for state in first.states:
        columns += _columns_of(state)
    return [*columns, Column("method", lambda cell: "/".join(sorted(_methods(cell))))]


def _columns_of(state: str) -> list[Column[Cell]]:
    def ratio(way: str, other: str, what: str = TOTAL) -> Callable[[Cell], object]:
        return lambda cell: cell.states[state].ratio(way, other, what)

    def spread(cell: Cell) -> str:
        low, _, high = cell.states[state].ratios(OURS, BIG)
        return f"[{low:.2f} {high:.2f}]"

    return [
        Column(f"{state}: total / big", ratio(OURS, BIG)),
        Column("[quartiles]", spread),
        Column("R / big", ratio(REFERENCE, BIG)),
        Column("total / R", ratio(OURS, REFERENCE)),
        Column("call, us", lambda cell: cell.states[state].median(OURS, SUBMIT)),
        Column("call / R's", ratio(OURS, REFERENCE, SUBMIT)),
    ]


def _methods(cell: Cell) -> set[str]:
    return {name for one in cell.states.values() for name in one.copy_methods.get(OURS, ())}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
