"""The figures of peers are there for the kinds of transfer that they were measured with."""

from __future__ import annotations

import pytest
from peers import best_peer
from transfers import Kind, Shape


@pytest.mark.parametrize(
    ("shape", "direction", "blocks", "ratio"),
    [
        ("64x32", "store", 1, 2.4),
        ("61x18", "load", 64, 1.13),
        ("1x2048", "load", 512, 1.02),
        ("64x32", "store", 16, None),
        ("160x8", "store", 8, None),
    ],
)
def test_the_best_peer_of_a_kind(
    shape: str, direction: str, blocks: int, ratio: float | None
) -> None:
    assert best_peer(Kind(Shape.parse(shape), direction, blocks)) == ratio
