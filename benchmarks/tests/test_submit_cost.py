"""The benchmark of the calls: it judges the worst cell, and the growth with the number of
layers.
"""

from __future__ import annotations

import pytest
import submit_cost

pytestmark = pytest.mark.slow  # of a benchmark program


def test_wrong_ids_of_an_expansion_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submit_cost, "expand_block_ids", lambda *_, out=None, **__: out)
    with pytest.raises(RuntimeError, match="expand_block_ids gave other ids than it should"):
        submit_cost.expand(100, 7, 2)


def test_an_expansion_need_not_end_with_a_large_block() -> None:
    assert submit_cost.expand(100, 7, 2).outputs == 100
