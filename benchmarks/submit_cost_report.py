"""What the calls cost: a table for each direction, one of expand_block_ids, and the targets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bandwidth_report import SUBMIT_US
from report import Verdict, table
from timing import Spread

GROWTH = 1.25  # of the median with most slabs over that with fewest: noise, not a loop over them
EXPANSION = 1.5  # over a memcpy of the outputs


@dataclass(frozen=True)
class Cell:
    """Calls of one kind, in microseconds. state: "held" or "free"."""

    slabs: int
    direction: str
    blocks: int
    state: str
    submit: Spread
    paths: list[str]
    wrong: int  # blocks and pages


@dataclass(frozen=True)
class Expansion:
    """expand_block_ids into memory that is there, a memcpy of its output, and expand_block_ids into
    memory of its own, in microseconds."""

    outputs: int
    factor: int
    expand: Spread
    memcpy: Spread
    allocating: Spread

    @property
    def ratio(self) -> float:
        return self.expand.median / self.memcpy.median


def tables(cells: Sequence[Cell]) -> str:
    """Median and p99 by blocks; a table for each direction."""
    directions = dict.fromkeys(cell.direction for cell in cells)
    return "\n\n".join(_of_direction(cells, name) for name in directions)


def _of_direction(cells: Sequence[Cell], direction: str) -> str:
    found = {
        (cell.state, cell.slabs, cell.blocks): cell for cell in cells if cell.direction == direction
    }
    counts = list(dict.fromkeys(blocks for _, _, blocks in found))
    headers = [f"{direction}, us", "slabs"]
    for blocks in counts:
        headers += [f"{blocks:,} block{'s' * (blocks > 1)}: median", "p99"]
    rows = []
    for state, slabs in sorted({(state, slabs) for state, slabs, _ in found}):
        row: list[object] = [state, slabs]
        for blocks in counts:
            submit = found[state, slabs, blocks].submit
            row += [submit.median, submit.p99]
        rows.append(row)
    return table(headers, rows)


def expansion_table(expansions: Sequence[Expansion]) -> str:
    headers = ["expand_block_ids", "factor", "median, us", "p99", "memcpy, us", "ratio"]
    rows = []
    for one in expansions:
        numbers = [one.expand.median, one.expand.p99, one.memcpy.median, one.ratio]
        rows.append([f"{one.outputs:,} ids", one.factor, *numbers, one.allocating.median])
    return table([*headers, "allocating, us"], rows)


def judge(cells: Sequence[Cell], expansions: Sequence[Expansion]) -> list[Verdict]:
    """A verdict is on the slowest cell, over directions, slabs and states."""
    return [*_submits(cells), *_growths(cells), *_expansions(expansions)]


def _submits(cells: Sequence[Cell]) -> Iterator[Verdict]:
    for blocks, target in SUBMIT_US.items():
        medians = [cell.submit.median for cell in cells if cell.blocks == blocks]
        if medians:
            yield Verdict(f"submit of {blocks} blocks, slowest median in us", target, max(medians))


def _growths(cells: Sequence[Cell]) -> Iterator[Verdict]:
    kinds = [(cell.blocks, cell.direction, cell.state) for cell in cells]
    medians: dict[tuple[int, str, str], dict[int, float]] = {kind: {} for kind in kinds}
    for kind, cell in zip(kinds, cells, strict=True):
        medians[kind][cell.slabs] = cell.submit.median
    for blocks in dict.fromkeys(blocks for blocks, _, _ in kinds):
        growths = [
            of_slabs[max(of_slabs)] / of_slabs[min(of_slabs)]
            for kind, of_slabs in medians.items()
            if kind[0] == blocks and len(of_slabs) > 1
        ]
        if growths:
            name = f"submit of {blocks:,} blocks, with most slabs over with fewest"
            yield Verdict(name, GROWTH, max(growths))


def _expansions(expansions: Sequence[Expansion]) -> Iterator[Verdict]:
    for one in expansions:
        yield Verdict(f"expand_block_ids by {one.factor} over memcpy", EXPANSION, one.ratio)
