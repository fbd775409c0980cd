"""A table of transfers beside a big copy and the reference, with their targets."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from comparison import BIG, OURS, PLAIN, REFERENCE, SUBMIT, Cell
from report import Column, Verdict, table_of

# What targets are on, and columns of the table.
OVER_BIG, OVER_REFERENCE = "total / big copy", "total / R"
CALL_OVER_REFERENCE = "call / R's call"

CAPTION = (
    "R: what PyTorch needs for one contiguous copy with the same guarantees; medians, [quartiles]\n"
    "of rounds; link: total / big copy on the device alone; (target), ! is a miss"
)

Targets = Callable[[Cell, str], Mapping[str, Verdict]]  # of a cell in a state, by what they are on


def measured(cell: Cell, state: str, what: str) -> float:
    samples = cell.states[state]
    if what == CALL_OVER_REFERENCE:
        return samples.ratio(OURS, REFERENCE, SUBMIT)
    return samples.ratio(OURS, REFERENCE if what == OVER_REFERENCE else BIG)


def verdict(cell: Cell, state: str, what: str, target: float) -> Verdict:
    return Verdict(f"{cell.kind}, {state}, {what}", target, measured(cell, state, what))


def tables(cells: Sequence[Cell], targets: Targets) -> str:
    """One for each arrangement and direction; a row for each shape and number of blocks."""
    kinds = dict.fromkeys((cell.kind.arrangement, cell.kind.direction) for cell in cells)
    said = [CAPTION]
    for kind in kinds:
        chosen = [cell for cell in cells if (cell.kind.arrangement, cell.kind.direction) == kind]
        has_plain = _has_plain(chosen[0])
        columns = _columns(", ".join(kind), chosen[0].states, targets, has_plain)
        said.append(table_of(columns, chosen))
    return "\n\n".join(said)


def _columns(
    title: str, states: Iterable[str], targets: Targets, has_plain: bool
) -> list[Column[Cell]]:
    columns: list[Column[Cell]] = [
        Column(title, lambda cell: str(cell.kind.shape)),
        Column("blocks", lambda cell: cell.kind.blocks),
    ]
    for state in states:
        columns += _columns_of(state, targets)
        columns += _plain_columns_of(state) if has_plain else []
    return [
        *columns,
        Column("link", lambda cell: cell.link_ratio),
        Column("method", lambda cell: "/".join(sorted(_methods(cell)))),
    ]


def _columns_of(state: str, targets: Targets) -> list[Column[Cell]]:
    def judged(what: str) -> Callable[[Cell], str]:
        return lambda cell: _text(cell, state, what, targets(cell, state))

    def spread(cell: Cell) -> str:
        low, _, high = cell.states[state].ratios(OURS, BIG)
        return f"[{low:.2f} {high:.2f}]"

    return [
        Column(f"{state}: total / big", judged(OVER_BIG)),
        Column("[quartiles]", spread),
        Column("R / big", lambda cell: cell.states[state].ratio(REFERENCE, BIG)),
        Column("total / R", judged(OVER_REFERENCE)),
        Column("call, us", lambda cell: cell.states[state].median(OURS, SUBMIT)),
        Column("call / R's", judged(CALL_OVER_REFERENCE)),
    ]


def _plain_columns_of(state: str) -> list[Column[Cell]]:
    return [
        Column("plain ops / big", lambda cell: cell.states[state].ratio(PLAIN, BIG)),
        Column("their call, us", lambda cell: cell.states[state].median(PLAIN, SUBMIT)),
    ]


def _methods(cell: Cell) -> set[str]:
    return {name for one in cell.states.values() for name in one.copy_methods.get(OURS, ())}


def _has_plain(cell: Cell) -> bool:
    return all(PLAIN in samples.moves for samples in cell.states.values())


def _text(cell: Cell, state: str, what: str, found: Mapping[str, Verdict]) -> str:
    said = f"{measured(cell, state, what):.2f}"
    if what not in found:
        return said
    return f"{said} ({found[what].target:.2f}){'' if found[what].met else ' !'}"


def no_targets(cell: Cell, state: str) -> Mapping[str, Verdict]:
    """Without a GPU nothing is judged."""
    return {}


def judge(cells: Sequence[Cell], targets: Targets) -> list[Verdict]:
    return [one for cell in cells for state in cell.states for one in targets(cell, state).values()]


def counts(cells: Sequence[Cell], targets: Targets) -> Iterator[str]:
    """Lines: of the targets of each kind that are met and missed."""
    found = [targets(cell, state) for cell in cells for state in cell.states]
    for what in (OVER_BIG, OVER_REFERENCE, CALL_OVER_REFERENCE):
        met = [of_cell[what].met for of_cell in found if what in of_cell]
        if met:
            yield f"{what}: {met.count(True)} met, {met.count(False)} missed"
