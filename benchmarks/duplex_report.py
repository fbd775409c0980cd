"""The target of moving both ways at once."""

from __future__ import annotations

from collections.abc import Mapping

from comparison import WARM, Cell
from comparison_report import OVER_BIG, verdict
from report import Verdict

# Of the time over that of two big copies at once, by blocks each way; also for fragments of less
# than 4 KiB.
RATIOS = {64: (1.15, 1.50), 512: (1.05, 1.12)}


def targets(cell: Cell, state: str) -> Mapping[str, Verdict]:
    blocks = cell.kind.blocks
    if state != WARM or blocks not in RATIOS:
        return {}
    target = RATIOS[blocks][cell.kind.shape.fragment_kib < 4]
    return {OVER_BIG: verdict(cell, state, OVER_BIG, target)}
