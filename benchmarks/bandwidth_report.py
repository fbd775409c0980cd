"""The targets of a transfer of scattered blocks."""

from __future__ import annotations

from collections.abc import Mapping

from comparison import COLD, REFERENCE, WARM, Cell
from comparison_report import CALL_OVER_REFERENCE, OVER_BIG, OVER_REFERENCE, verdict
from report import Verdict

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


def targets(cell: Cell, state: str) -> Mapping[str, Verdict]:
    """By what they are on."""
    blocks, kib = cell.kind.blocks, cell.kind.shape.fragment_kib
    found = {}
    if blocks == 1:
        reference = cell.states[state].median(REFERENCE)
        found[OVER_REFERENCE] = (reference + EXTRA_US[state]) / reference
    else:
        found[OVER_BIG] = RATIOS[blocks][state][(kib < 8) + (kib < 4)]
    found[CALL_OVER_REFERENCE] = CALLS[blocks][state]
    return {what: verdict(cell, state, what, target) for what, target in found.items()}
