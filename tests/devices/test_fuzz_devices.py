"""Random caches and random jobs on the fake accelerator. See tests/support/fuzz.py."""

from __future__ import annotations

import random

import pytest
from fuzz import Options, Scenario, fuzz
from fuzz_cache import MismatchError
from fuzz_devices import Accelerated
from queued_devices import on_queued_device


@on_queued_device
def test_random_jobs_leave_the_bytes_of_the_model(accelerator):
    def make(seed: int) -> Scenario:
        return Scenario(Accelerated(accelerator, seed), seed)

    counts = fuzz(make, 4)
    assert counts["done"] > 0
    assert counts["compared"] > 0


@on_queued_device
def test_random_jobs_of_several_threads_leave_the_bytes_of_the_model(accelerator):
    def make(seed: int) -> Scenario:
        sessions = random.Random(f"{seed} several").randint(2, 3)
        options = Options(steps=80, sessions=sessions, handlers=random.Random(seed).randint(1, 2))
        return Scenario(Accelerated(accelerator, seed, alone=False), seed, options)

    counts = fuzz(make, 3)
    assert counts["done"] > 0
    assert counts["compared"] > 0


@pytest.mark.parametrize("wrong", ["after_nothing", "no_waits"])
@on_queued_device
def test_a_missing_wait_is_found(accelerator, wrong):
    def make(seed: int) -> Scenario:
        return Scenario(Accelerated(accelerator, seed), seed, Options(**{wrong: True}))

    with pytest.raises(MismatchError):
        fuzz(make, 20)
