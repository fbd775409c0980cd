"""Fixtures of tests with a page server, or with a second tier."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from below_engine import Engine
from memory_store import MemoryStore


@pytest.fixture
def path(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Of a socket, which may not have a long name. Copies end when somebody polls or waits."""
    monkeypatch.setenv("KVSWAP_LATE_CPU", "1")
    with tempfile.TemporaryDirectory() as folder:
        yield str(Path(folder) / "pages")


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def reader(store: MemoryStore) -> Iterator[Engine]:
    """Another engine that has found nothing yet, beside one that has shared "abcdefgh"."""
    with Engine(MemoryStore(store.objects)) as writer:
        writer.share("abcdefgh")
    with Engine(store) as engine:
        yield engine
