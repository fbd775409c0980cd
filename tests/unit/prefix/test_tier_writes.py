"""What is written to a second tier, also around a reset, and when it fails."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import below_engine
import pytest
from below_engine import BLOCK_BYTES, Engine, bytes_of, key_of, works_again
from logged import logged
from memory_store import MemoryStore
from patience import in_time

from torch_kvswap.below import threads
from torch_kvswap.prefix import BlockManager

PROMPT = list("abcdefgh")


def test_only_reused_pages_are_written_unless_all_are(store: MemoryStore) -> None:
    with Engine(store, policy="reused") as engine:
        engine.compute(PROMPT)
        engine.load(PROMPT[:3])
        engine.until(lambda: engine.stats.written == 3)
        assert len(store.objects) == 3
    with Engine(MemoryStore(store.objects)) as engine:
        engine.share(PROMPT)
        assert len(store.objects) == len(PROMPT)


def test_a_page_in_the_store_is_written_once(store: MemoryStore, reader: Engine) -> None:
    reader.compute(PROMPT)
    reader.until(lambda: reader.stats.written == len(PROMPT))
    assert "put" not in store.calls


def test_writers_of_one_page_damage_nothing(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has computed it with other bytes, and one writes while the other one does."""
    other = MemoryStore(store.objects)
    store.held, other.held = {"put"}, {"put"}
    with Engine(store) as first, Engine(other) as second:
        with monkeypatch.context() as patch:
            patch.setattr(below_engine, "bytes_of", lambda key: 255 - bytes_of(key))
            first.compute("a")
        second.compute("a")
        assert in_time(lambda: len(store.waiting) == len(other.waiting) == 1)
        store.waiting.popleft()()  # the first put of an engine, all of the other one, the rest
        assert in_time(lambda: bool(store.objects))
        other.release()
        second.until(lambda: second.stats.written == 1)
        store.release()
        first.until(lambda: first.stats.written == 1)
    with Engine(MemoryStore(store.objects)) as reader:
        assert reader.load("a") == 1
        assert reader.stats.damaged == 0


def test_bytes_in_flight_are_limited_in_both_directions(store: MemoryStore) -> None:
    store.held = {"put", "get"}
    with Engine(store, bytes_in_flight=3 * BLOCK_BYTES) as engine:
        engine.compute(PROMPT)
        assert in_time(lambda: len(store.waiting) == 3)
        engine.prefixes.poll()
        store.release()
        engine.until(lambda: engine.stats.written == len(PROMPT))
    other = MemoryStore(store.objects)
    other.held = {"get"}
    with Engine(other, bytes_in_flight=3 * BLOCK_BYTES) as engine:
        engine.prefixes.lookup(list(map(key_of, PROMPT)))
        assert in_time(lambda: len(other.waiting) == 3)
        other.release()
        assert engine.load(PROMPT) == len(PROMPT)


@pytest.fixture
def change_weights(monkeypatch: pytest.MonkeyPatch) -> Callable[[Engine], None]:
    def change(engine: Engine) -> None:
        engine.prefixes.reset()
        monkeypatch.setattr(below_engine, "bytes_of", lambda key: 255 - bytes_of(key))

    return change


def test_nothing_from_before_a_reset_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change_weights: Callable[[Engine], None]
) -> None:
    with Engine(f"file:{tmp_path}", pages=8) as engine, Engine(f"file:{tmp_path}") as other:
        engine.share(PROMPT)
        change_weights(engine)
        assert engine.find(PROMPT).found == 0
        engine.share(PROMPT[:4])
        engine.share("stuvwxyz")
        engine.tier._absent.clear()
        assert engine.load(PROMPT[:4]) == 4
        assert engine.stats.promoted == 4
        monkeypatch.undo()  # the others have the weights that below_model names
        assert other.load(PROMPT) == 8
        assert other.find("s").found == 0


def test_pages_held_at_a_reset_keep_their_names(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch, change_weights: Callable[[Engine], None]
) -> None:
    store.held = {"exists"}
    with Engine(store) as engine:
        engine.compute(PROMPT)
        assert in_time(lambda: len(store.waiting) > 0)
        change_weights(engine)
        engine.compute("x")
        store.release()
        engine.until(lambda: sum("-" in name for name in store.objects) == 1)
        assert engine.find(PROMPT).found == 0
    monkeypatch.undo()
    with Engine(MemoryStore(store.objects)) as other:
        for name in PROMPT:
            other.load(name)
        assert other.find("x").found == 0


def test_a_write_without_memory_is_tried_again(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Engine(store) as engine:
        with monkeypatch.context() as patched, logged() as warnings:
            patched.setattr(BlockManager, "_hold_due", Mock(side_effect=MemoryError))
            engine.compute(PROMPT)
            assert in_time(lambda: bool(warnings))
        works_again(engine)
        engine.until(lambda: engine.stats.written == len(PROMPT))


@pytest.mark.parametrize("operation", ["exists", "put"])
def test_nothing_is_written_during_a_pause(
    operation: str, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "FIRST_PAUSE", 1000.0)
    store.failing = {operation}
    with Engine(store) as engine:
        engine.compute(PROMPT)
        engine.until(lambda: engine.stats.failed > 0)
        engine.compute("ij")
        assert in_time(lambda: engine.tier._writes.is_idle)
        assert engine.stats.failed <= 4, "an eighth of the pages, which were on their way before"
