"""The benchmark of host memory: it judges its figures right, and notices memory that is not
zero.
"""

from __future__ import annotations

import host_memory
import pytest
import torch
from host_memory_report import Cell

pytestmark = pytest.mark.slow  # of a benchmark program


def test_the_ways_are_measured_in_another_order_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[tuple[str, object, bool]] = []
    monkeypatch.setattr(
        host_memory, "take", lambda cell, make, counts: taken.append((cell.name, make, counts))
    )
    cells = host_memory.measure({"torch": 1, "HostPool": 2}, 1 << 20, 2)  # type: ignore[dict-item]
    assert [cell.name for cell in cells] == ["torch", "HostPool"]
    theirs, ours = ("torch", 1), ("HostPool", 2)
    assert [one[:2] for one in taken] == [ours, theirs, theirs, ours, ours, theirs]
    assert [counts for *_, counts in taken] == [False, False, True, True, True, True]


def test_memory_that_is_not_zero_is_wrong() -> None:
    cell = Cell("HostPool", 1 << 20)
    host_memory.take(cell, lambda nbytes: (torch.ones(nbytes, dtype=torch.uint8), None), True)
    assert cell.wrong == 1
    host_memory.take(cell, lambda nbytes: (torch.zeros(nbytes, dtype=torch.uint8), None), True)
    assert cell.wrong == 1
