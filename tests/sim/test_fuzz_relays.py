"""Random jobs with relays on the simulated driver, whose links go at random speeds. See
tests/support/fuzz.py.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from fuzz import Options, Scenario, fuzz
from fuzz_cache import MismatchError
from fuzz_devices import Simulated
from relayed import relayed_handler
from simulated_cache import HURTS_A_JOB, needs_kernels
from simulated_driver import Driver, simulated

LINKS = [{"device": gpu} for gpu in range(3)]
LINKS += [{"device": 0, "peer": 1}, {"device": 0, "peer": 2}]
MODES = pytest.mark.parametrize("mode", ["manual", "threaded"])


class Relayed(Simulated):
    """GPUs 1 and 2 relay for GPU 0, and large transfers are common."""

    block_shapes = large_shapes = ((64, 1024), (128, 1000))

    def __init__(self, driver: Driver, mode: str, seed: int, alone: bool = True) -> None:
        super().__init__(driver, mode, seed, alone)
        self.copy_methods = ["staged"]
        self.handler = self.make
        self.block_bytes, self.memory_bytes = 1 << 19, 1 << 24
        self.chance = random.Random(f"{seed} links")
        self.relayed = 0

    def make(self, *arguments: Any, **options: Any) -> Any:
        relays = self.chance.choice([(1,), (1, 2)])
        options["staging_bytes"] = 1 << 20
        return relayed_handler(*arguments, relays=relays, **options)

    def let_run(self, rng: random.Random) -> None:
        # A worker may still wait for all links when the fault has happened.
        if not self.planned:
            slownesses = [0, 1] if self.mode == "manual" else [1, 4, 32]
            self.driver.set_link(
                **self.chance.choice(LINKS), slowness=self.chance.choice(slownesses)
            )
        if self.mode == "manual":
            for _ in range(self.chance.choice([0, 3, 30])):
                self.driver.step(self.chance.choice(range(101, 118)))
        super().let_run(rng)

    def release(self) -> None:
        super().release()
        for link in LINKS:
            self.driver.set_link(**link, slowness=1)

    def fail_sometime(self, rng: random.Random) -> None:
        self.release()  # a job that fails waits for what is ahead of it
        if self.alone:
            name, nth = rng.choice([*HURTS_A_JOB, "cuMemcpyPeerAsync"]), rng.randint(1, 8)
            self.planned.setdefault(name, []).append(self.driver.fail(name, nth))

    def finish(self) -> str:
        self.relayed = self.driver.calls("cuMemcpyPeerAsync")
        return super().finish()


class ManyPieces(Relayed):
    """A ring of more pieces than are remembered, which three links fill. No call fails."""

    def make(self, *arguments: Any, **options: Any) -> Any:
        options["staging_bytes"] = 4 << 20
        return relayed_handler(*arguments, relays=(1, 2), **options)

    def let_run(self, rng: random.Random) -> None:
        for _ in range(self.chance.choice([0, 3, 30])):
            self.driver.step(self.chance.choice(range(101, 118)))
        Simulated.let_run(self, rng)

    def fail_sometime(self, rng: random.Random) -> None:
        pass


@MODES
@needs_kernels
@simulated
def test_random_relayed_jobs_leave_the_models_bytes(driver: Driver, mode: str) -> None:
    made: list[Relayed] = []

    def scenario(seed: int) -> Scenario:
        made.append(Relayed(driver, mode, seed))
        return Scenario(made[-1], seed)

    counts = fuzz(scenario, 4)
    assert counts["done"] > 0
    assert counts["compared"] > 0
    assert sum(device.relayed for device in made) > 0


@pytest.mark.parametrize("seed", ["1", "2", "3"])
@needs_kernels
@simulated
def test_many_pieces_of_three_links_arrive(driver: Driver, seed: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVSWAP_FUZZ_SEED", seed)
        fuzz(lambda number: Scenario(ManyPieces(driver, "manual", number), number), 1)


@needs_kernels
@simulated
def test_random_relayed_jobs_of_several_threads(driver: Driver) -> None:
    made: list[Relayed] = []

    def scenario(seed: int) -> Scenario:
        options = Options(sessions=2, handlers=seed % 2 + 1)
        made.append(Relayed(driver, "threaded", seed, alone=False))
        return Scenario(made[-1], seed, options)

    counts = fuzz(scenario, 3)
    assert counts["done"] > 0
    assert counts["compared"] > 0
    assert sum(device.relayed for device in made) > 0


@MODES
@needs_kernels
@simulated
def test_as_a_control_gpus_do_not_wait_for_each_other(driver: Driver, mode: str) -> None:
    def scenario(seed: int) -> Scenario:
        device = Relayed(driver, mode, seed)
        driver.drop_waits_between_gpus()
        return Scenario(device, seed)

    with pytest.raises(MismatchError, match=r"KVSWAP_FUZZ_SEED=\d"):
        fuzz(scenario, 20)
