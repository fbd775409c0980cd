"""A pytest plugin: a test fails if a sanitizer reports anything while it runs, in any process."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

REPORTS = Path(os.environ["KVSWAP_REPORTS"])
seen: set[Path] = set()


@pytest.fixture(autouse=True)
def _no_report() -> Iterator[None]:
    yield
    new = sorted({*REPORTS.iterdir()} - seen)
    seen.update(new)
    if new:
        pytest.fail("\n".join(file.read_text(errors="replace") for file in new), pytrace=False)
