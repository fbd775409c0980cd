"""Random caches and random jobs on a GPU, compared with the model of tests/support/fuzz.py."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from fuzz import Options, Scenario, fuzz, fuzz_seconds
from fuzz_devices import Gpu
from processes import watchdog

pytestmark = pytest.mark.gpu

STEPS = 1500


@pytest.fixture(autouse=True)
def _no_hang(capfd: pytest.CaptureFixture[str]) -> Iterator[None]:
    with watchdog(capfd, 3 * fuzz_seconds() + 180):
        yield


def alone(seed: int, index: int = 0) -> Scenario:
    return Scenario(Gpu(index), seed, Options(steps=STEPS))


def several(seed: int) -> Scenario:
    rng = random.Random(f"{seed} several")
    sessions = rng.randint(2, 4)
    options = Options(steps=STEPS // 2, sessions=sessions, handlers=rng.choice([1, 1, 2]))
    return Scenario(Gpu(), seed, options)


def test_random_jobs_on_a_gpu() -> None:
    counts = fuzz(alone, 4)
    assert counts["done"] > 0
    assert counts["compared"] > 0


def test_random_jobs_of_several_threads_on_a_gpu() -> None:
    counts = fuzz(several, 3)
    assert counts["done"] > 0
    assert counts["compared"] > 0


def test_random_jobs_on_all_gpus_at_once() -> None:
    """A thread for each GPU, with a handler; waits go through streams of the others."""
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs two GPUs, here are {torch.cuda.device_count()}")
    counts: list[Counter[str]] = []
    errors: list[BaseException] = []

    def work(index: int) -> None:
        try:
            counts.append(fuzz(lambda seed: alone(seed, index), 2))
        except BaseException as error:
            errors.append(error)

    threads = [
        threading.Thread(target=work, args=(index,)) for index in range(torch.cuda.device_count())
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    for of_device in counts:
        assert of_device["done"] > 100
