"""Fixtures of tests with a page server."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def path(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Of a socket, which may not have a long name. Copies end when somebody polls or waits."""
    monkeypatch.setenv("KVSWAP_LATE_CPU", "1")
    with tempfile.TemporaryDirectory() as folder:
        yield str(Path(folder) / "pages")
