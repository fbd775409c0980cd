"""Threads that call a store, and their pauses."""

from __future__ import annotations

import pytest
from logged import logged

from torch_kvswap.below import threads


def test_pauses_grow_and_are_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now, seconds = [0.0], []
    monkeypatch.setattr(threads.time, "monotonic", lambda: now[0])
    now[0] = 1000.0
    reads = threads.StoreThreads("reading from file:folder", 1, lambda: None)
    for expected in (["reading from file:folder pauses for 1 s: no answer"], []):
        with logged() as messages:
            for _ in range(8):
                reads.pause("no answer")
                reads.pause("no answer")  # of another call
                assert reads.is_away
                seconds.append(reads._until - now[0])
                now[0] = reads._until
                assert not reads.is_away
                assert reads.is_doubtful
        assert messages == expected
    assert seconds[:8] == [1, 2, 4, 8, 16, 32, 60, 60]
    reads.end_pause()
    assert not reads.is_doubtful
    with logged() as messages:
        reads.pause("no answer")
    assert messages == ["reading from file:folder pauses for 1 s: no answer"]
    reads.close()
