"""What the calls cost: a table for each direction, one of expand_block_ids, and the targets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from bandwidth_report import CALLS
from comparison import BIG, HELD, OURS, REFERENCE, SUBMIT, WARM, Cell
from comparison_report import peer_of
from report import Verdict, table
from timing import Spread

GROWTH = 1.25  # of the median with most layers over that with fewest: noise, not a loop over them
EXPANSION = 1.5  # over a memcpy of the outputs


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
    """One for each arrangement and direction; a row for each shape, number of blocks and state."""
    kinds = dict.fromkeys((cell.kind.arrangement, cell.kind.direction) for cell in cells)
    said = [
        "host time in the call, us; R: what PyTorch needs for one copy with the same guarantees"
    ]
    for kind in kinds:
        chosen = [cell for cell in cells if (cell.kind.arrangement, cell.kind.direction) == kind]
        said.append(_table(", ".join(kind), chosen))
    return "\n\n".join(said)


def _table(title: str, cells: Sequence[Cell]) -> str:
    headers = [title, "blocks", "state", "median", "p90", "p99", "big copy", "R", "median / R"]
    headers.append("best peer")
    rows: list[list[object]] = []
    for cell in cells:
        for state, samples in cell.states.items():
            ours = np.percentile(samples.numbers(OURS, SUBMIT), [50, 90, 99]).tolist()
            beside = [samples.median(way, SUBMIT) for way in (BIG, REFERENCE)]
            ratio = samples.ratio(OURS, REFERENCE, SUBMIT)
            peer = peer_of(cell, state)
            numbers = [*ours, *beside, ratio, peer and peer.submit_us]
            rows.append([str(cell.kind.shape), cell.kind.blocks, state, *numbers])
    return table(headers, rows)


def expansion_table(expansions: Sequence[Expansion]) -> str:
    headers = ["expand_block_ids", "factor", "median, us", "p99", "memcpy, us", "ratio"]
    rows = []
    for one in expansions:
        numbers = [one.expand.median, one.expand.p99, one.memcpy.median, one.ratio]
        rows.append([f"{one.outputs:,} ids", one.factor, *numbers, one.allocating.median])
    return table([*headers, "allocating, us"], rows)


def judge_calls(cells: Sequence[Cell]) -> list[Verdict]:
    """A verdict is on the worst cell, over directions, shapes and arrangements."""
    return [*_calls(cells), *_growths(cells)]


def _calls(cells: Sequence[Cell]) -> Iterator[Verdict]:
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
    """Of what does not depend on the state of the caches."""
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


def judge_expansions(expansions: Sequence[Expansion]) -> list[Verdict]:
    return [
        Verdict(f"expand_block_ids by {one.factor} over memcpy", EXPANSION, one.ratio)
        for one in expansions
    ]
