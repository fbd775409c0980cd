"""Random caches and random jobs on the CPU and on the simulated driver. See
tests/support/fuzz.py.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
import torch
from below_engine import key_of
from fuzz import Options, Scenario, fuzz
from fuzz_below import BelowServer
from fuzz_cache import MismatchError
from fuzz_devices import Device, Gpu, Simulated
from fuzz_prefixes import EncodedServer, Server
from fuzz_torn import Torn
from memory_store import MemoryStore
from patience import in_time
from simulated_cache import CURRENT, needs_kernels, run_until
from simulated_driver import Driver, place, pool, simulated

from torch_kvswap import Job, PagedLayout, PrefixCache
from torch_kvswap.prefix import BlockManager
from torch_kvswap.prefix.tier import Tier


def several(seed: int) -> Options:
    rng = random.Random(f"{seed} several")
    sessions = rng.randint(2, 3)
    return Options(sessions=sessions, handlers=rng.randint(1, sessions))


def test_random_jobs_on_the_cpu() -> None:
    counts = fuzz(lambda seed: Scenario(Device(), seed), 12)
    assert counts["done"] > 0
    assert counts["compared"] > 0


def test_random_jobs_of_several_threads_on_the_cpu() -> None:
    counts = fuzz(lambda seed: Scenario(Device(), seed, several(seed)), 4)
    assert counts["done"] > 0
    assert counts["compared"] > 0


@pytest.mark.parametrize("mode", ["immediate", "manual", "threaded"])
@simulated
def test_random_jobs_on_the_simulated_driver(driver: Driver, mode: str) -> None:
    counts = fuzz(lambda seed: Scenario(Simulated(driver, mode, seed), seed), 8)
    assert counts["done"] > 0
    assert counts["compared"] > 0


@simulated
def test_random_jobs_of_threads_on_the_simulated_driver(
    driver: Driver,
) -> None:
    def make(seed: int) -> Scenario:
        return Scenario(Simulated(driver, "threaded", seed, alone=False), seed, several(seed))

    counts = fuzz(make, 4)
    assert counts["done"] > 0
    assert counts["compared"] > 0


MISTAKES = {
    "stores and loads do not wait": Options(after_nothing=True),
    "reads do not wait": Options(no_waits=True),
}


@pytest.mark.parametrize("mode", ["manual", "threaded"])
@pytest.mark.parametrize("mistake", MISTAKES)
@simulated
def test_control_missing_waits_are_found(driver: Driver, mode: str, mistake: str) -> None:
    with pytest.raises(MismatchError, match=r"KVSWAP_FUZZ_SEED=\d"):
        fuzz(lambda seed: Scenario(Simulated(driver, mode, seed), seed, MISTAKES[mistake]), 20)


# Random prompts through a prefix cache with few pages: a load brings back what was stored for its key.


def check(counts: Counter[str]) -> None:
    assert counts["compared"] > 0
    assert counts["evicted"] > 0


def test_prefixes_on_the_cpu_have_their_bytes() -> None:
    check(fuzz(lambda seed: Server(Device(), seed), 10))


@pytest.mark.parametrize("mode", ["manual", "threaded"])
@simulated
def test_prefixes_on_the_simulated_driver_have_their_bytes(driver: Driver, mode: str) -> None:
    check(fuzz(lambda seed: Server(Simulated(driver, mode, seed), seed), 3))


def check_encoded(counts: Counter[str]) -> None:
    check(counts)
    assert counts["rejected"] > 0


def test_encoded_prefixes_on_the_cpu_are_found() -> None:
    check_encoded(fuzz(lambda seed: EncodedServer(Device(), seed), 10))


@pytest.mark.parametrize("mode", ["manual", "threaded"])
@needs_kernels
@simulated
def test_encoded_prefixes_on_the_simulated_driver_are_found(driver: Driver, mode: str) -> None:
    check_encoded(fuzz(lambda seed: EncodedServer(Simulated(driver, mode, seed), seed), 5))


@pytest.mark.gpu
def test_encoded_prefixes_on_a_gpu_are_found() -> None:
    check_encoded(fuzz(lambda seed: EncodedServer(Gpu(), seed, steps=600), 6))


@pytest.mark.gpu
def test_prefixes_on_a_gpu_have_their_bytes() -> None:
    check(fuzz(lambda seed: Server(Gpu(), seed, steps=600), 6))


def check_below(counts: Counter[str]) -> None:
    check(counts)
    for what in ("promoted", "written", "damaged", "restarts", "hangs", "get fails", "put fails"):
        assert counts[what] > 0, what


def test_prefixes_on_the_cpu_survive_a_faulty_store() -> None:
    check_below(fuzz(lambda seed: BelowServer(Device(), seed), 10))


@simulated
def test_prefixes_on_the_simulated_driver_survive_faults(
    driver: Driver,
) -> None:
    counts = fuzz(lambda seed: BelowServer(Simulated(driver, "threaded", seed), seed), 3)
    assert counts["compared"] > 0
    assert counts["written"] > 0


def test_control_late_answers_write_into_others_pages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def end_task(tier: Tier, ask: Any) -> None:
        if not ask.is_abandoned:
            whole(tier, ask)

    whole = Tier._end_task
    monkeypatch.setattr(BlockManager, "_abandon", BlockManager.fail)
    monkeypatch.setattr(Tier, "_end_task", end_task)
    with pytest.raises(MismatchError, match=r"KVSWAP_FUZZ_SEED=\d"):
        fuzz(lambda seed: BelowServer(Device(), seed, {"get": (0.0, 0.5)}), 80)


def test_control_names_that_no_reset_changes_bring_old_pages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Tier, "_suffix", lambda *_: "")
    with pytest.raises(MismatchError, match=r"KVSWAP_FUZZ_SEED=\d"):
        fuzz(lambda seed: BelowServer(Device(), seed), 40)


# Two handlers store and load the same pages at the same time: checksums find what is of two stores.


ENCODINGS = pytest.mark.parametrize("encoding", ["raw", "lossless"])


def check_torn(counts: Counter[str]) -> None:
    assert counts["load, done"] > 0
    assert counts["load, failed"] > 0


@ENCODINGS
def test_torn_pages_are_found_on_the_cpu(encoding: str) -> None:
    check_torn(fuzz(lambda seed: Torn(None, seed, encoding=encoding), 3))


@ENCODINGS
@needs_kernels
@simulated
def test_torn_pages_are_found_on_the_simulated_driver(driver: Driver, encoding: str) -> None:
    check_torn(fuzz(lambda seed: Torn(driver, seed, encoding=encoding), 3))


@ENCODINGS
@needs_kernels
@simulated
def test_control_torn_pages_without_checksums_are_loaded(driver: Driver, encoding: str) -> None:
    with pytest.raises(MismatchError, match=r"KVSWAP_FUZZ_SEED=\d"):
        fuzz(lambda seed: Torn(driver, seed, "off", encoding), 3)


# Pages from a second tier of a prefix cache, on a device whose copies can fail.


def result_of(driver: Driver, job: Job | None) -> str:
    assert job is not None
    run_until(driver, job.query)
    assert job.result is not None
    return job.result.state


@pytest.mark.parametrize("marks", [True, False], ids=["", "a control that marks no pages"])
@simulated
def test_a_page_from_below_loads_after_failed_stores(driver: Driver, marks: bool) -> None:
    driver.set_mode("manual")
    driver.set_stream(0, CURRENT)
    tensor = torch.randint(256, (8, 4096), dtype=torch.uint8)
    layout = place(driver, PagedLayout([tensor]))
    objects: dict[str, bytes] = {}

    def engine() -> PrefixCache:
        return PrefixCache(
            layout,
            pool(driver, layout, 1),
            below=MemoryStore(objects),
            below_model="m",
            below_policy="all",
        )

    with engine() as writer:
        job = writer.store([key_of("a")], [1]).job
        assert result_of(driver, job) == "done"
        writer.poll()
        assert in_time(lambda: len(objects) == 1)
    with engine() as reader:
        if not marks:
            reader._below._mark_written = lambda pages: None  # type: ignore[union-attr]
        driver.fail("cuMemcpyAsync")
        job = reader.store([key_of("x")], [2]).job
        assert result_of(driver, job) == "failed"
        reader.poll()
        while reader.lookup([key_of("a")]).ready == 0:
            reader.poll(timeout=1.0)
        job = reader.load([key_of("a")], [3])
        assert result_of(driver, job) == ("done" if marks else "failed")
        assert torch.equal(tensor[3], tensor[1]) == marks
        reader.poll()
