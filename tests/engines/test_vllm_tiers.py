"""vLLM's file tier below our host memory, under vLLM's real scheduler, with both connectors."""

from __future__ import annotations

import logging
import os
import random
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from patience import PATIENCE, in_time
from vllm_engine import SPEC
from vllm_serving import IS_033, Serving, expected_tokens, serving

from torch_kvswap.integrations.vllm import rows as rows_module
from torch_kvswap.integrations.vllm import tiering as tiering_module

TIERS = SPEC | {"spec_name": "KVSwapTieringOffloadingSpec"}
THEIRS = {"kv_connector": "OffloadingConnector", "kv_connector_module_path": None}
DOORS = pytest.mark.parametrize("door", [{}, THEIRS], ids=["ours", "theirs"])
BLOCK = 16


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PYTHONHASHSEED", "0")  # vLLM 0.26 names files at random without it
    return tmp_path


def tier(folder: Path, **more: Any) -> dict[str, Any]:
    return {**TIERS, "secondary_tiers": [{"type": "fs", "root_dir": f"{folder}/rows"}], **more}


def files(folder: Path) -> dict[Path, int]:
    """The rows in the tier, and when they were written."""
    return {one: one.stat().st_mtime_ns for one in (folder / "rows").rglob("*.bin")}


def prompt(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(512), k=length)


PROMPTS = {f"{n}": prompt(n, 33 + 16 * n) for n in range(5)}
CHUNKS = sum(len(one) // BLOCK for one in PROMPTS.values())


def check(engine: Serving, prompts: dict[str, list[int]], count: int = 4) -> None:
    for name, one in prompts.items():
        assert engine.tokens[name] == expected_tokens(one, count), name


def manager_of(engine: Serving) -> Any:
    return engine.scheduler.connector.connector_scheduler.manager


def of_tier(engine: Serving) -> Any:
    return manager_of(engine).secondary_tiers[0]


class Promoted:
    """Counts the rows that an engine reads from its tier."""

    def __init__(self, engine: Serving) -> None:
        self.count, self._submit = 0, of_tier(engine).submit_load
        of_tier(engine).submit_load = self

    def __call__(self, job: Any) -> None:
        self.count += len(job.keys)
        self._submit(job)


def nothing_is_held(engine: Serving) -> bool:
    stats = manager_of(engine).primary_tier._blocks.stats()
    return bool(stats.free_pages + stats.idle_pages == stats.pages)


@DOORS
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("chunk", [1, 2])
def test_a_new_engine_finds_all_chunks_that_an_old_one_left(folder, door, is_async, chunk):
    how = {"extra": tier(folder, blocks_per_chunk=chunk), "transfer": door, "is_async": is_async}
    with serving(folder, **how) as engine:
        engine.serve(PROMPTS)
        check(engine, PROMPTS)
    expected = sum(len(one) // (BLOCK * chunk) for one in PROMPTS.values())
    stored = files(folder)
    assert len(stored) == expected
    with serving(folder, **how) as engine:
        promoted = Promoted(engine)
        engine.serve(PROMPTS)
        check(engine, PROMPTS)
        assert promoted.count == expected
        assert files(folder) == stored
        assert nothing_is_held(engine)


def test_what_host_memory_has_evicted_comes_from_the_tier(folder):
    """Host memory has room for less than half of the chunks."""
    with serving(folder, extra=tier(folder), pages=CHUNKS // 2 - 2) as engine:
        promoted = Promoted(engine)
        for turn in range(3):
            prompts = {f"{turn} {name}": one for name, one in PROMPTS.items()}
            for name, one in prompts.items():
                engine.serve({name: one})
            check(engine, prompts)
            engine.forget_gpu()
        assert promoted.count > 0
        assert manager_of(engine).primary_tier._blocks.stats().evicted > promoted.count
        assert nothing_is_held(engine)


@DOORS
def test_a_short_row_is_computed_again_and_stored_again(folder, door):
    how = {"extra": tier(folder), "transfer": door}
    one = {"first": prompt(1, 100)}
    with serving(folder, **how) as engine:
        engine.serve(one)
    rows = files(folder)
    os.truncate(max(rows), 100)
    with serving(folder, **how) as engine:
        engine.serve(one)
        check(engine, one)
        assert nothing_is_held(engine)
    assert {row: row.stat().st_size for row in rows} == dict.fromkeys(rows, 4096)


def test_rows_of_another_namespace_are_not_found_and_the_log_names_ours(
    folder, monkeypatch, caplog
):
    caplog.set_level(logging.INFO, "torch_kvswap")
    with serving(folder, extra=tier(folder)) as engine:
        engine.serve(PROMPTS)
    stored = files(folder)
    monkeypatch.setattr(rows_module, "_FORMAT", "other")
    with serving(folder, extra=tier(folder)) as engine:
        promoted = Promoted(engine)
        engine.serve(PROMPTS)
        check(engine, PROMPTS)
        assert promoted.count == 0
    assert len(files(folder)) == 2 * len(stored)
    said = [one for one in caplog.messages if "finds only rows that were stored as" in one]
    assert re.fullmatch(r"secondary tier 0 \(fs\) .* as: \w+, torch_kvswap 1: raw, .*", said[0])
    assert len(said) == 2


class Stores:
    """Replaces what the file tier does with a row, in its threads."""

    def __init__(self, patch: pytest.MonkeyPatch, instead: Callable[[], None]) -> None:
        from vllm.v1.kv_offload.tiering.fs import manager

        def store(*arguments: Any) -> None:
            self.count += 1
            instead()
            real(*arguments)

        self.count, name = 0, "batch_store_block" if IS_033 else "store_block"
        real = getattr(manager, name)
        patch.setattr(manager, name, store)


@DOORS
def test_while_a_tier_hangs_requests_are_served_and_stores_are_dropped(folder, door, monkeypatch):
    goes_on = threading.Event()
    stores = Stores(monkeypatch, lambda: goes_on.wait(PATIENCE) and None)
    with serving(folder, extra=tier(folder), transfer=door, pages=8) as engine:
        try:
            for name, one in PROMPTS.items():
                engine.add(name, one)
            assert in_time(lambda: engine.step() or engine.ends.keys() == PROMPTS.keys())
            check(engine, PROMPTS)
            stats = manager_of(engine).primary_tier._blocks.stats()
            assert stats.refused > 0, "all pages are held for the tier"
            assert stores.count > 0
        finally:
            goes_on.set()
        engine.run()
        again = {f"again {name}": one for name, one in PROMPTS.items()}
        engine.serve(again)
        check(engine, again)
        assert nothing_is_held(engine)
    assert len(files(folder)) > 0


def test_a_full_disk_drops_rows_and_nothing_else(folder, monkeypatch):
    def full() -> None:
        raise OSError(28, "No space left on device")

    stores = Stores(monkeypatch, full)
    with serving(folder, extra=tier(folder), pages=8) as engine:
        for name in "ab":
            prompts = {f"{name} {key}": one for key, one in PROMPTS.items()}
            engine.serve(prompts)
            check(engine, prompts)
        assert stores.count > 0
        assert nothing_is_held(engine)
    assert files(folder) == {}


def serve_with_resets(engine: Serving, resets: int) -> None:
    for turn in range(resets):
        prompts = {f"{turn} {name}": one for name, one in PROMPTS.items()}
        for name, one in prompts.items():
            engine.add(name, one)
        for _ in range(2 + turn % 3):
            engine.step()
        engine.scheduler.connector.reset_cache()
        engine.run()
        check(engine, prompts)
        engine.forget_gpu()


@DOORS
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_resets_lose_no_pages(folder, door, is_async):
    how = {"extra": tier(folder), "transfer": door, "is_async": is_async}
    with serving(folder, pages=64, **how) as engine:
        serve_with_resets(engine, 12)
        assert nothing_is_held(engine)


@pytest.mark.skipif(not IS_033, reason="0.26 does not say when workers have ended their jobs")
def test_pages_are_lost_if_the_end_of_a_reset_is_not_told(folder, monkeypatch):
    """The control of the test above."""
    manager = tiering_module.KVSwapTieringManager
    monkeypatch.setattr(manager, "on_reset_flushed", manager.__base__.on_reset_flushed)
    with serving(folder, extra=tier(folder), pages=64) as engine:
        serve_with_resets(engine, 12)
        assert not nothing_is_held(engine)
