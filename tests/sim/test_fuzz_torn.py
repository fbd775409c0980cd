"""Two handlers store and load the same pages at the same time: checksums find what is of two stores.

KVSWAP_FUZZ_SEED and KVSWAP_FUZZ_SECONDS: see tests/support/fuzz.py.
"""

from __future__ import annotations

from collections import Counter

import pytest
from fuzz import fuzz
from fuzz_cache import MismatchError
from fuzz_torn import Torn
from simulated_cache import needs_kernels
from simulated_driver import Driver, simulated

ENCODINGS = pytest.mark.parametrize("encoding", ["raw", "lossless"])


def check(counts: Counter[str]) -> None:
    assert counts["load, done"] > 0
    assert counts["load, failed"] > 0


@ENCODINGS
def test_torn_pages_are_found_on_the_cpu(encoding: str) -> None:
    check(fuzz(lambda seed: Torn(None, seed, encoding=encoding), 3))


@ENCODINGS
@needs_kernels
@simulated
def test_torn_pages_are_found_on_the_simulated_driver(driver: Driver, encoding: str) -> None:
    check(fuzz(lambda seed: Torn(driver, seed, encoding=encoding), 3))


@ENCODINGS
def test_as_a_control_torn_pages_without_checksums_are_loaded(encoding: str) -> None:
    with pytest.raises(MismatchError, match=r"KVSWAP_FUZZ_SEED=\d"):
        fuzz(lambda seed: Torn(None, seed, "off", encoding), 3)


@ENCODINGS
@needs_kernels
@simulated
def test_as_a_control_the_simulated_driver_loads_torn_pages(driver: Driver, encoding: str) -> None:
    with pytest.raises(MismatchError, match=r"KVSWAP_FUZZ_SEED=\d"):
        fuzz(lambda seed: Torn(driver, seed, "off", encoding), 3)
