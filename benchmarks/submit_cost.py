"""Times the calls of store() and load() alone, by blocks and by layers.

Beside them the calls of one big copy of the same bytes, and of the reference R. All three in turn,
warm and cold, as in bandwidth.py. "held": as warm, but the caller's stream is busy, so the transfer
begins only after the call. Without a GPU nothing is held, and the calls copy too.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # a checkout need not be installed

from bandwidth import CALLS
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
from program import is_judged
from report import Column, Verdict, table_of

SHAPES = ("1x8", "160x8")
GROWTH = 1.25  # of the median with most layers over that with fewest: noise, not a loop over them
CAPTION = "host time in the call, us; R: what PyTorch needs for one copy with the same guarantees"
Row = tuple[Cell, str, Samples]  # of a state


def main(arguments: list[str]) -> int:
    options = comparison_parser(__doc__, samples=50, cold_samples=10).parse_args(arguments)
    states = (WARM, HELD, COLD) if options.device == "cuda" else (WARM, COLD)
    cells = measure_all(plan_of(options, states, SHAPES), options, "calls")
    verdicts = [*_calls(cells), *_growths(cells)] if is_judged(options) else []
    print(tables(cells), "", *verdicts, "", sep="\n")
    return finish_cells(options, "submit_cost", cells, verdicts)


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


def _calls(cells: Sequence[Cell]) -> Iterator[Verdict]:
    """On the worst cell, over directions, shapes and arrangements."""
    ratios: dict[tuple[int, str], list[float]] = {}
    for cell in cells:
        for state, samples in cell.states.items():
            ratio = samples.ratio(OURS, REFERENCE, SUBMIT)
            ratios.setdefault((cell.kind.blocks, state), []).append(ratio)
    for (blocks, state), found in ratios.items():
        if blocks in CALLS:
            name = f"call of {blocks} blocks, {state}, over that of the reference, worst"
            yield Verdict(name, CALLS[blocks][WARM if state == HELD else state], max(found))


def _growths(cells: Sequence[Cell]) -> Iterator[Verdict]:
    """On the worst cell, of what does not depend on the state of the caches."""
    medians: dict[tuple[int, str, str, str], dict[int, float]] = {}
    for cell in cells:
        kind = cell.kind
        for state in {WARM, HELD} & {*cell.states}:
            key = kind.blocks, kind.arrangement, kind.direction, state
            median = cell.states[state].median(OURS, SUBMIT)
            medians.setdefault(key, {})[kind.shape.layers] = median
    for blocks in dict.fromkeys(key[0] for key in medians):
        growths = [
            of_layers[max(of_layers)] / of_layers[min(of_layers)]
            for key, of_layers in medians.items()
            if key[0] == blocks and len(of_layers) > 1
        ]
        if growths:
            name = f"call of {blocks:,} blocks, with most layers over with fewest, worst"
            yield Verdict(name, GROWTH, max(growths))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
