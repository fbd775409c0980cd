"""Random caches and random jobs on the CPU and on the simulated driver. See
tests/support/fuzz.py.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from fuzz import Options, Scenario, fuzz
from fuzz_cache import MismatchError
from fuzz_devices import Device, Simulated
from simulated_driver import Driver, simulated

from torch_kvswap import OffloadHandler


def several(seed: int) -> Options:
    rng = random.Random(f"{seed} several")
    sessions = rng.randint(2, 3)
    return Options(sessions=sessions, handlers=rng.randint(1, sessions))


def test_random_jobs_on_the_cpu_leave_the_bytes_of_the_model() -> None:
    counts = fuzz(lambda seed: Scenario(Device(), seed), 12)
    assert counts["done"] > 0
    assert counts["compared"] > 0


def test_random_jobs_of_several_threads_on_the_cpu_leave_the_bytes_of_the_model() -> None:
    counts = fuzz(lambda seed: Scenario(Device(), seed, several(seed)), 4)
    assert counts["done"] > 0
    assert counts["compared"] > 0


@pytest.mark.parametrize("mode", ["immediate", "manual", "threaded"])
@simulated
def test_random_jobs_on_the_simulated_driver_leave_the_bytes_of_the_model(
    driver: Driver, mode: str
) -> None:
    counts = fuzz(lambda seed: Scenario(Simulated(driver, mode, seed), seed), 8)
    assert counts["done"] > 0
    assert counts["compared"] > 0


@simulated
def test_random_jobs_of_several_threads_on_the_simulated_driver_leave_the_bytes_of_the_model(
    driver: Driver,
) -> None:
    def make(seed: int) -> Scenario:
        return Scenario(Simulated(driver, "threaded", seed, alone=False), seed, several(seed))

    counts = fuzz(make, 4)
    assert counts["done"] > 0
    assert counts["compared"] > 0


class SwapsSometimes:
    """A handler that swaps the first two source ids of every tenth job that has two."""

    def __init__(self, handler: OffloadHandler) -> None:
        self.handler, self.jobs = handler, 0

    def store(self, *, gpu_block_ids: Any, **options: Any) -> Any:
        return self.handler.store(gpu_block_ids=self._swapped(gpu_block_ids), **options)

    def load(self, *, page_ids: Any, **options: Any) -> Any:
        return self.handler.load(page_ids=self._swapped(page_ids), **options)

    def _swapped(self, ids: Any) -> Any:
        is_flat = not isinstance(ids, list) or not ids or isinstance(ids[0], int)
        of_group = next((some for some in ([ids] if is_flat else ids) if len(some) > 1), None)
        self.jobs += of_group is not None
        if of_group is not None and self.jobs % 10 == 3:
            of_group[0], of_group[1] = int(of_group[1]), int(of_group[0])
        return ids


MISTAKES = {
    "swapped ids": Options(wrap=SwapsSometimes),
    "stores and loads do not wait": Options(after_nothing=True),
    "reads do not wait": Options(no_waits=True),
}


def test_as_a_control_swapped_ids_are_found() -> None:
    with pytest.raises(MismatchError, match=r"KVSWAP_FUZZ_SEED=\d"):
        fuzz(lambda seed: Scenario(Device(), seed, MISTAKES["swapped ids"]), 5)


@pytest.mark.parametrize("mode", ["manual", "threaded"])
@pytest.mark.parametrize("mistake", MISTAKES)
@simulated
def test_as_a_control_mistakes_are_found_on_the_simulated_driver(
    driver: Driver, mode: str, mistake: str
) -> None:
    with pytest.raises(MismatchError, match=r"KVSWAP_FUZZ_SEED=\d"):
        fuzz(lambda seed: Scenario(Simulated(driver, mode, seed), seed, MISTAKES[mistake]), 20)
