"""Fixtures of tests on a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from gpu_cache import GpuCache
from processes import watchdog


@pytest.fixture
def gpu() -> Iterator[GpuCache]:
    """A cache on cuda:0. A module that needs another one has a fixture of this name itself."""
    with GpuCache() as gpu:
        yield gpu


@pytest.fixture
def no_hang(capfd: pytest.CaptureFixture[str]) -> Iterator[None]:
    """Ends the process if the test hangs. Not for tests without a limit, such as fuzz tests."""
    with watchdog(capfd):
        yield
