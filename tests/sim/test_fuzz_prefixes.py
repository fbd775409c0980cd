"""Random prompts through a prefix cache with few pages: a load brings back what was stored for its key.

KVSWAP_FUZZ_SEED and KVSWAP_FUZZ_SECONDS: see tests/support/fuzz.py.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from fuzz import fuzz
from fuzz_below import BelowServer
from fuzz_cache import MismatchError
from fuzz_devices import Device, Gpu, Simulated
from fuzz_prefixes import EncodedServer, Server
from simulated_cache import needs_kernels
from simulated_driver import Driver, simulated

from torch_kvswap import PrefixCache
from torch_kvswap._C import StoreReservation
from torch_kvswap.below.format import PageFormat
from torch_kvswap.prefix import BlockManager
from torch_kvswap.prefix.tier import Tier


def check(counts: Counter[str]) -> None:
    assert counts["compared"] > 0
    assert counts["evicted"] > 0


def test_prefix_caches_on_the_cpu_load_the_bytes_of_the_keys() -> None:
    check(fuzz(lambda seed: Server(Device(), seed), 10))


@pytest.mark.parametrize("mode", ["manual", "threaded"])
@simulated
def test_prefix_caches_on_the_simulated_driver_load_the_bytes_of_the_keys(
    driver: Driver, mode: str
) -> None:
    check(fuzz(lambda seed: Server(Simulated(driver, mode, seed), seed), 3))


def check_encoded(counts: Counter[str]) -> None:
    check(counts)
    assert counts["rejected"] > 0


def test_prefix_caches_on_the_cpu_find_encoded_blocks_if_they_fit() -> None:
    check_encoded(fuzz(lambda seed: EncodedServer(Device(), seed), 10))


@pytest.mark.parametrize("mode", ["manual", "threaded"])
@needs_kernels
@simulated
def test_prefix_caches_on_the_simulated_driver_find_encoded_blocks_if_they_fit(
    driver: Driver, mode: str
) -> None:
    check_encoded(fuzz(lambda seed: EncodedServer(Simulated(driver, mode, seed), seed), 5))


@pytest.mark.gpu
def test_prefix_caches_on_a_gpu_find_encoded_blocks_if_they_fit() -> None:
    check_encoded(fuzz(lambda seed: EncodedServer(Gpu(), seed, steps=600), 6))


def test_as_a_control_encoded_blocks_that_were_not_computed_are_found() -> None:
    with pytest.raises(MismatchError, match=r"KVSWAP_FUZZ_SEED=\d"):
        fuzz(lambda seed: EncodedServer(Device(), seed, stale=True), 5)


@pytest.mark.gpu
def test_prefix_caches_on_a_gpu_load_the_bytes_of_the_keys() -> None:
    check(fuzz(lambda seed: Server(Gpu(), seed, steps=600), 6))


def test_as_a_control_kept_records_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """What evict() stores after a reset or a rebind, if nothing is forgotten then."""
    monkeypatch.setattr(PrefixCache, "_records", lambda prefixes: (prefixes._lazy, None))
    with pytest.raises(MismatchError, match=r"KVSWAP_FUZZ_SEED=\d"):
        fuzz(lambda seed: Server(Device(), seed), 40)


def test_as_a_control_blocks_that_were_not_computed_are_found() -> None:
    with pytest.raises(MismatchError, match=r"KVSWAP_FUZZ_SEED=\d"):
        fuzz(lambda seed: Server(Device(), seed, stale=True), 5)


def check_below(counts: Counter[str]) -> None:
    check(counts)
    for what in ("promoted", "written", "damaged", "restarts", "hangs", "get fails", "put fails"):
        assert counts[what] > 0, what


def test_prefix_caches_on_the_cpu_survive_a_faulty_store_below() -> None:
    check_below(fuzz(lambda seed: BelowServer(Device(), seed), 10))


@simulated
def test_prefix_caches_on_the_simulated_driver_survive_a_faulty_store_below(
    driver: Driver,
) -> None:
    check_below(fuzz(lambda seed: BelowServer(Simulated(driver, "threaded", seed), seed), 5))


def test_as_a_control_a_store_that_hides_failures_loses_good_pages() -> None:
    with pytest.raises(AssertionError, match="good pages were deleted"):
        fuzz(lambda seed: BelowServer(Device(), seed, lies=True), 40)


def test_as_a_control_late_answers_write_into_pages_that_were_given_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def give_away(manager: BlockManager, reservation: StoreReservation) -> None:
        manager.fail(reservation)
        manager.release(reservation)

    def hand_over(tier: Tier, ask: Any, *others: Any) -> None:
        if not ask.is_over:
            whole(tier, ask, *others)

    whole = Tier._hand_over
    monkeypatch.setattr(BlockManager, "abandon", give_away)
    monkeypatch.setattr(Tier, "_hand_over", hand_over)
    with pytest.raises(MismatchError, match=r"KVSWAP_FUZZ_SEED=\d"):
        fuzz(lambda seed: BelowServer(Device(), seed, {"get": (0.0, 0.5)}), 80)


def test_as_a_control_damaged_pages_that_nobody_checks_are_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(PageFormat, "problem", lambda *_: None)
    with pytest.raises(MismatchError, match=r"KVSWAP_FUZZ_SEED=\d"):
        fuzz(lambda seed: BelowServer(Device(), seed), 40)
