"""Tables of what moves the same blocks, over a big copy, and where another way is faster."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from statistics import median

from comparison import BIG, OURS, REFERENCE, Cell, Samples
from report import Column, Verdict, table_of

AHEAD_US = 3.0  # what calls and launches differ by


def others(samples: Samples) -> list[str]:
    """The ways that move the same blocks."""
    return [way for way in samples.moves if way not in (OURS, BIG, REFERENCE)]


def behind_us(samples: Samples, way: str) -> float:
    """How much longer ours takes than another way in the same round."""
    pairs = zip(samples.numbers(OURS), samples.numbers(way), strict=True)
    return median(ours - other for ours, other in pairs)


def judge(cells: Sequence[Cell]) -> list[Verdict]:
    return [
        Verdict(f"{cell.kind}, {state}, us behind {way}", AHEAD_US, behind_us(samples, way))
        for cell in cells
        for state, samples in cell.states.items()
        for way in others(samples)
    ]


def tables(cells: Sequence[Cell]) -> str:
    """One for each arrangement and state; a row for each shape, number of blocks and direction."""
    return "\n\n".join(_tables(cells))


def _tables(cells: Sequence[Cell]) -> Iterator[str]:
    yield f"total / big copy, medians; ! is more than {AHEAD_US:g} us ahead of ours"
    for arrangement in dict.fromkeys(cell.kind.arrangement for cell in cells):
        chosen = [cell for cell in cells if cell.kind.arrangement == arrangement]
        for state in chosen[0].states:
            yield table_of(_columns(f"{arrangement}, {state}", state, chosen[0]), chosen)


def _columns(title: str, state: str, first: Cell) -> list[Column[Cell]]:
    def ratio(way: str) -> Callable[[Cell], object]:
        return lambda cell: cell.states[state].ratio(way, BIG)

    def marked(way: str) -> Callable[[Cell], str]:
        def text(cell: Cell) -> str:
            samples = cell.states[state]
            mark = " !" if behind_us(samples, way) > AHEAD_US else ""
            return f"{samples.ratio(way, BIG):.2f}{mark}"

        return text

    return [
        Column(title, lambda cell: str(cell.kind.shape)),
        Column("blocks", lambda cell: cell.kind.blocks),
        Column("direction", lambda cell: cell.kind.direction),
        Column("big copy, us", lambda cell: cell.states[state].median(BIG)),
        Column(OURS, ratio(OURS)),
        *(Column(way, marked(way)) for way in others(first.states[state])),
        Column("contiguous copy", ratio(REFERENCE)),
    ]
