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
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # a checkout need not be installed

from comparison import (
    BIG,
    COLD,
    OURS,
    REFERENCE,
    SUBMIT,
    WARM,
    Cell,
    by_kind,
    comparison_parser,
    finish_cells,
    measure_all,
    plan_of,
)
from program import is_judged
from report import Column, Verdict, table_of

# What targets are on, and columns of the tables.
OVER_BIG, OVER_REFERENCE = "total / big copy", "total / R"
CALL_OVER_REFERENCE = "call / R's call"
# By blocks and state. Of the total time over that of one big copy, for fragments of 8 KiB and more,
# of 4 KiB and more, and for smaller ones. A single block may take EXTRA_US more than the reference.
RATIOS = {
    8: {WARM: (1.15, 1.30, 1.45), COLD: (1.25, 1.50, 1.80)},
    64: {WARM: (1.05, 1.10, 1.18), COLD: (1.08, 1.17, 1.28)},
    512: {WARM: (1.02, 1.04, 1.06), COLD: (1.03, 1.06, 1.10)},
}
EXTRA_US = {WARM: 5.0, COLD: 20.0}
# Of the call over that of the reference.
CALLS = {
    1: {WARM: 0.7, COLD: 0.8},
    8: {WARM: 1.3, COLD: 1.0},
    64: {WARM: 1.5, COLD: 1.1},
    512: {WARM: 3.0, COLD: 1.5},
}
CAPTION = (
    "R: what PyTorch needs for one contiguous copy with the same guarantees; medians, [quartiles]\n"
    "of rounds; (target), ! is a miss"
)


def main(arguments: list[str]) -> int:
    options = comparison_parser(__doc__, samples=20, cold_samples=10).parse_args(arguments)
    cells = measure_all(plan_of(options, (WARM, COLD)), options, "bandwidth")
    judged = is_judged(options)
    print(tables(cells, judged), "", *(counts(cells) if judged else ()), "", sep="\n")
    return finish_cells(options, "bandwidth", cells, judge_all(cells) if judged else [])


def judge(cell: Cell, state: str) -> dict[str, Verdict]:
    """By what they are on; of other numbers of blocks there are none."""
    blocks, kib = cell.kind.blocks, cell.kind.shape.fragment_kib
    if blocks not in CALLS:
        return {}
    targets = {CALL_OVER_REFERENCE: CALLS[blocks][state]}
    if blocks == 1:
        reference = cell.states[state].median(REFERENCE)
        targets[OVER_REFERENCE] = (reference + EXTRA_US[state]) / reference
    else:
        targets[OVER_BIG] = RATIOS[blocks][state][(kib < 8) + (kib < 4)]
    return {
        what: Verdict(f"{cell.kind}, {state}, {what}", target, _measured(cell, state, what))
        for what, target in targets.items()
    }


def judge_all(cells: Sequence[Cell]) -> list[Verdict]:
    return [one for cell in cells for state in cell.states for one in judge(cell, state).values()]


def _measured(cell: Cell, state: str, what: str) -> float:
    samples = cell.states[state]
    if what == CALL_OVER_REFERENCE:
        return samples.ratio(OURS, REFERENCE, SUBMIT)
    return samples.ratio(OURS, REFERENCE if what == OVER_REFERENCE else BIG)


def tables(cells: Sequence[Cell], judged: bool) -> str:
    """One for each arrangement and direction; a row for each shape and number of blocks."""
    said = [table_of(_columns(title, of[0], judged), of) for title, of in by_kind(cells)]
    return "\n\n".join([CAPTION, *said])


def _columns(title: str, first: Cell, judged: bool) -> list[Column[Cell]]:
    columns: list[Column[Cell]] = [
        Column(title, lambda cell: str(cell.kind.shape)),
        Column("blocks", lambda cell: cell.kind.blocks),
    ]
    for state in first.states:
        columns += _columns_of(state, judged)
    return [*columns, Column("method", lambda cell: "/".join(sorted(_methods(cell))))]


def _columns_of(state: str, judged: bool) -> list[Column[Cell]]:
    def with_target(what: str) -> Callable[[Cell], str]:
        def text(cell: Cell) -> str:
            said = f"{_measured(cell, state, what):.2f}"
            found = judge(cell, state).get(what) if judged else None
            return f"{said} ({found.target:.2f}){'' if found.met else ' !'}" if found else said

        return text

    def spread(cell: Cell) -> str:
        low, _, high = cell.states[state].ratios(OURS, BIG)
        return f"[{low:.2f} {high:.2f}]"

    return [
        Column(f"{state}: total / big", with_target(OVER_BIG)),
        Column("[quartiles]", spread),
        Column("R / big", lambda cell: cell.states[state].ratio(REFERENCE, BIG)),
        Column("total / R", with_target(OVER_REFERENCE)),
        Column("call, us", lambda cell: cell.states[state].median(OURS, SUBMIT)),
        Column("call / R's", with_target(CALL_OVER_REFERENCE)),
    ]


def _methods(cell: Cell) -> set[str]:
    return {name for one in cell.states.values() for name in one.copy_methods.get(OURS, ())}


def counts(cells: Sequence[Cell]) -> Iterator[str]:
    """Lines: of the targets of each kind that are met and missed."""
    found = [judge(cell, state) for cell in cells for state in cell.states]
    for what in (OVER_BIG, OVER_REFERENCE, CALL_OVER_REFERENCE):
        met = [of_cell[what].met for of_cell in found if what in of_cell]
        if met:
            yield f"{what}: {met.count(True)} met, {met.count(False)} missed"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
