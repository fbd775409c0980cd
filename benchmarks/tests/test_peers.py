"""The figures of others are found by the kind of transfer."""

from __future__ import annotations

import pytest
from peers import Peer, best_peer

pytestmark = pytest.mark.slow  # of a benchmark program


@pytest.mark.parametrize(
    ("kind", "state", "peer"),
    [
        ((160, 4, "load", 8), "warm", Peer(1.80)),
        ((160, 4, "load", 8), "held", Peer(1.80)),
        ((160, 4, "load", 8), "cold", Peer(1.99, 191)),
        ((160, 4, "load", 64), "cold", Peer(1.20, 717)),  # the bulk-copy kernel, SGLang's call
        ((64, 32, "store", 64), "cold", Peer(1.14, 376)),
        ((160, 8, "store", 8), "warm", None),
        ((64, 32, "load", 8), "cold", None),
        ((160, 4, "load", 16), "cold", None),
        ((160, 2, "both", 64), "cold", Peer(1.72)),
        ((160, 2, "both", 64), "warm", None),
        ((160, 8, "both", 64), "cold", None),
    ],
)
def test_the_best_peer_is_that_of_the_state(
    kind: tuple[int, int, str, int], state: str, peer: Peer | None
) -> None:
    assert best_peer(*kind, state) == peer
