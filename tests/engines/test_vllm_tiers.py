"""vLLM's file tier below our host memory, under vLLM's real scheduler, with both connectors."""

from __future__ import annotations

import logging
import os
import random
import re
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from patience import PATIENCE, in_time
from vllm_contract import bytes_of
from vllm_engine import base, bf16_cache, caches, folder, keys
from vllm_serving import (
    BLOCK,
    CHUNKS,
    PROMPTS,
    RECOMPUTE,
    RUNNERS,
    SCHEDULERS,
    Faults,
    RandomRequests,
    Serving,
    again,
    check,
    expected_tokens,
    only,
    prompt,
    serving,
)
from vllm_tiers import TieredRanks, files, tier

from torch_kvswap.host_pool import description
from torch_kvswap.integrations.vllm import tiering as tiering_module
from torch_kvswap.integrations.vllm.connector import MetricsSpec
from torch_kvswap.integrations.vllm.tiering import KVSwapTieringOffloadingSpec

__all__ = ["folder"]


def damage(row: Path) -> None:
    content = bytearray(row.read_bytes())
    content[1000] ^= 4
    row.write_bytes(content)


def of_tier(engine: Serving) -> Any:
    return engine.manager.secondary_tiers[0]


class Promoted:
    """Counts the rows that an engine reads from its tier."""

    def __init__(self, engine: Serving) -> None:
        self.count, self._submit = 0, of_tier(engine).submit_load
        of_tier(engine).submit_load = self

    def __call__(self, job: Any) -> None:
        self.count += len(job.keys)
        self._submit(job)


def nothing_is_held(engine: Serving) -> bool:
    stats = engine.manager.primary_tier._blocks.stats()
    return bool(stats.free_pages + stats.idle_pages == stats.pages)


@SCHEDULERS
@pytest.mark.parametrize("chunk", [1, 2])
def test_a_new_engine_finds_all_chunks_that_an_old_one_left(folder, is_async, chunk):
    how = {"extra": tier(folder, blocks_per_chunk=chunk), "is_async": is_async}
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


@SCHEDULERS
def test_a_request_whose_load_failed_is_computed_although_the_tier_has_it(folder, is_async):
    """vLLM would reserve blocks for a second load beside those of the first one, and wait for more than
    the GPU has, with all requests behind this one."""
    one = prompt(1, 250)
    how = {"extra": tier(folder), "transfer": RECOMPUTE}
    with serving(folder, **how, is_async=is_async, blocks=28) as engine:
        engine.serve({"first": one})
        assert in_time(lambda: len(files(folder)) == len(one) // BLOCK)
        engine.forget_gpu()
        faults = Faults(engine, only("load"))
        engine.serve({"again": one})
        assert faults.count["load"] == 1
        check(engine, {"first": one, "again": one})
        assert nothing_is_held(engine)


def test_a_short_row_is_computed_again_and_stored_again(folder):
    how = {"extra": tier(folder)}
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


@RUNNERS
@SCHEDULERS
def test_a_damaged_row_is_computed_again_and_not_read_again(folder, runner, is_async):
    how = {"extra": tier(folder, verify="load"), "runner": runner, "is_async": is_async}
    how["transfer"] = RECOMPUTE
    one = prompt(1, 100)
    with serving(folder, **how) as engine:
        engine.serve({"a": one})
        key = base.make_offload_key(engine.requests["a"].block_hashes[3], 0)
        damage(Path(of_tier(engine).file_mapper.get_file_name(key)))
    assert len(files(folder)) == 6
    with serving(folder, **how) as engine:
        promoted = Promoted(engine)
        # All of them, none, and those in front of the damaged one.
        for name, read, is_reset in (("b", 6, False), ("c", 0, True), ("d", 3, False)):
            promoted.count = 0
            engine.serve({name: one})
            check(engine, {name: one})
            assert engine.worker._handler.metrics().loads.corrupted_blocks == 1
            assert promoted.count == read
            engine.forget_gpu()
            if is_reset:
                engine.scheduler.connector.reset_cache()
        assert nothing_is_held(engine)


def test_without_digests_a_damaged_row_gives_a_wrong_answer(folder):
    """The control of the tests above."""
    one = {"a": prompt(1, 97)}
    with serving(folder, extra=tier(folder)) as engine:
        engine.serve(one)
    damage(max(files(folder)))
    with serving(folder, extra=tier(folder)) as engine:
        engine.serve(one)
        assert engine.ends["a"] == "length"
        assert engine.tokens["a"] != expected_tokens(one["a"], 4)


def test_rows_of_another_namespace_are_not_found_and_the_log_names_ours(
    folder, monkeypatch, caplog
):
    caplog.set_level(logging.INFO, "torch_kvswap")
    with serving(folder, extra=tier(folder)) as engine:
        engine.serve(PROMPTS)
    stored = files(folder)
    monkeypatch.setattr(description, "FORMAT_VERSION", "other")
    with serving(folder, extra=tier(folder)) as engine:
        promoted = Promoted(engine)
        engine.serve(PROMPTS)
        check(engine, PROMPTS)
        assert promoted.count == 0
    assert len(files(folder)) == 2 * len(stored)
    said = [one for one in caplog.messages if "finds only rows that were stored as" in one]
    assert re.match(r"secondary tier 0 \(fs\) .* as \w+, torch_kvswap \w{32}: \{\n", said[0])
    assert len(said) == 2


class Stores:
    """Replaces what the file tier does with a row, in its threads."""

    def __init__(self, patch: pytest.MonkeyPatch, instead: Callable[[], None]) -> None:
        from vllm.v1.kv_offload.tiering.fs import manager

        def store(*arguments: Any) -> None:
            self.count += 1
            instead()
            real(*arguments)

        self.count, name = 0, "batch_store_block"
        real = getattr(manager, name)
        patch.setattr(manager, name, store)


def test_while_a_tier_hangs_requests_are_served_and_stores_are_dropped(folder, monkeypatch):
    goes_on = threading.Event()
    stores = Stores(monkeypatch, lambda: goes_on.wait(PATIENCE) and None)
    with serving(folder, extra=tier(folder), pages=8) as engine:
        try:
            for name, one in PROMPTS.items():
                engine.add(name, one)
            assert in_time(lambda: engine.step() or engine.ends.keys() == PROMPTS.keys())
            check(engine, PROMPTS)
            stats = engine.manager.primary_tier._blocks.stats()
            assert stats.refused > 0, "all pages are held for the tier"
            assert stores.count > 0
        finally:
            goes_on.set()
        engine.run()
        engine.serve(again("again"))
        check(engine, again("again"))
        assert nothing_is_held(engine)
    assert len(files(folder)) > 0


def test_a_full_disk_drops_rows_and_nothing_else(folder, monkeypatch):
    def full() -> None:
        raise OSError(28, "No space left on device")

    stores = Stores(monkeypatch, full)
    with serving(folder, extra=tier(folder), pages=8) as engine:
        for turn in range(2):
            engine.serve(again(turn))
            check(engine, again(turn))
        assert stores.count > 0
        assert nothing_is_held(engine)
    assert files(folder) == {}


def serve_with_resets(engine: Serving, resets: int) -> None:
    """Each reset finds jobs that have not ended."""
    jobs = engine.scheduler.connector.connector_scheduler
    for turn in range(resets):
        for name, one in again(turn).items():
            engine.add(name, one)
        assert in_time(lambda: engine.step() or jobs._jobs)
        engine.scheduler.connector.reset_cache()
        engine.run()
        check(engine, again(turn))
        engine.forget_gpu()


@SCHEDULERS
def test_resets_lose_no_pages(folder, is_async):
    how = {"extra": tier(folder), "is_async": is_async}
    with serving(folder, pages=64, **how) as engine:
        serve_with_resets(engine, 12)
        assert nothing_is_held(engine)


def test_pages_are_lost_if_the_end_of_a_reset_is_not_told(folder, monkeypatch):
    """The control of the test above."""
    manager = tiering_module.KVSwapTieringManager
    monkeypatch.setattr(manager, "on_reset_flushed", manager.__base__.on_reset_flushed)
    with serving(folder, extra=tier(folder), pages=64) as engine:
        serve_with_resets(engine, 1)
        assert not nothing_is_held(engine)


@SCHEDULERS
def test_an_engine_that_has_slept_finds_its_rows(folder, is_async):
    with serving(folder, extra=tier(folder), is_async=is_async) as engine:
        engine.serve(PROMPTS)
        for turn in range(3):
            engine.add(f"aborted {turn}", prompt(40 + turn, 300), 50)
            for _ in range(3):
                engine.step()
            engine.sleep_and_wake()
            promoted = Promoted(engine)
            engine.serve(again(turn))
            check(engine, again(turn))
            assert promoted.count == CHUNKS
        assert nothing_is_held(engine)


@pytest.mark.parametrize("damages", [False, True])
@SCHEDULERS
def test_random_requests_are_served_right_from_all_tiers(folder, damages, is_async):
    """Prompts with common beginnings, prefilled in pieces, preempted and aborted, with little host
    memory. Rows may be damaged meanwhile."""
    chosen = random.Random(11)
    extra = tier(folder, verify="load" if damages else "off")
    how = {"extra": extra, "transfer": RECOMPUTE, "is_async": is_async}
    with serving(folder, **how, blocks=28, pages=24, batched=64) as engine:
        promoted = Promoted(engine)
        requests = RandomRequests(engine, chosen)
        for _ in range(40):
            requests.go_on(5, aborts=0.4)
            rows = sorted(files(folder))
            if damages and rows and chosen.random() < 0.3:
                damage(chosen.choice(rows))
        engine.run()
        check(engine, requests.served, requests.TOKENS)
        assert promoted.count > 50
        assert requests.preempted
        corrupted = engine.worker._handler.metrics().loads.corrupted_blocks
        assert bool(corrupted) == damages
        assert nothing_is_held(engine)


@pytest.mark.parametrize("encoding", ["raw", "lossless"])
@pytest.mark.parametrize("chunk", [1, 2])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_row_has_the_blocks_of_all_ranks_also_after_a_restart(folder, encoding, chunk, world):
    ranks = [bf16_cache(rank) for rank in range(world)]
    expected = [[bytes_of(one, block) for block in range(6)] for one in ranks]
    named, blocks, how = keys(*range(6 // chunk)), list(range(6)), {"encoding": encoding}
    engine = TieredRanks(folder, ranks, chunk=chunk, block_bytes=4096, **how)
    request = engine.request("old")
    engine.store(request, named, blocks)
    engine.end(request)
    engine.shutdown()
    assert len(files(folder)) == len(named)
    for one in ranks:
        for tensor in one.tensors:
            tensor.tensor.zero_()
    engine = TieredRanks(folder, ranks, chunk=chunk, block_bytes=4096, **how)
    request = engine.request("new")
    assert engine.found(request, named) == ["HIT"] * len(named)
    engine.load(request, named, [11, 10, 9, 8, 7, 6])
    engine.shutdown()
    for one, right in zip(ranks, expected, strict=True):
        assert [bytes_of(one, block) for block in range(11, 5, -1)] == right


def test_chunks_from_a_tier_are_evicted_from_the_end_of_their_prompt(folder):
    """vLLM reserves their pages one by one, from the front."""
    how = {"block_bytes": 4096, "cpu_bytes_to_use": 3 * 4096}
    engine = TieredRanks(folder, [bf16_cache()], **how)
    request = engine.request("old")
    engine.store(request, keys(1, 2, 3), [1, 2, 3])
    engine.end(request)
    engine.shutdown()
    engine = TieredRanks(folder, [bf16_cache()], **how)
    assert engine.found(engine.request("new"), keys(1, 2, 3)) == ["HIT"] * 3
    output = engine.manager.prepare_store(keys(7, 8), engine.request("other"))
    assert output.evicted_keys == keys(3, 2)
    engine.shutdown()


def test_pages_are_held_until_all_reads_of_the_same_chunks_have_ended(folder):
    engine = TieredRanks(folder, [bf16_cache()], block_bytes=4096)
    request, primary = engine.request("r"), engine.manager.primary_tier
    engine.store(request, keys(1), [1])
    for _ in range(2):
        primary.prepare_read(keys(1), request)
    idle = []
    for _ in range(2):
        primary.complete_read(keys(1), request)
        idle.append(primary._blocks.stats().idle_pages)
    assert idle == [0, 1]
    with pytest.raises(RuntimeError, match="not all of the 2 chunks that a tier is to read are"):
        primary.prepare_read(keys(1, 2), request)
    engine.shutdown()


def test_nothing_is_promoted_after_a_reset_until_all_workers_have_ended_their_jobs(folder):
    engine = TieredRanks(folder, [bf16_cache()], block_bytes=4096)
    request = engine.request("r")
    engine.store(request, keys(1), [1])
    engine.manager.reset_cache()
    assert engine.found(request, keys(1)) == ["MISS"]
    engine.manager.on_reset_flushed()
    assert engine.found(request, keys(1)) == ["HIT"]
    engine.shutdown()


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"store_threshold": 2}, "store_threshold is 2, which is not possible with spec_name"),
        (
            {"host_server": "unix:/s", "cpu_bytes_to_use": None},
            "host_server is 'unix:/s', which is not possible with spec_name",
        ),
    ],
)
def test_options_that_tiers_cannot_have_are_refused_by_every_process(folder, wrong, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        KVSwapTieringOffloadingSpec(TieredRanks.config(folder, 1, 0, **wrong))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"type": "nvme"}, "type 'nvme' cannot be made: Unknown secondary"),
        ({"type": "fs", "root_dir": "/proc/none"}, "type 'fs' cannot be made: [Errno 2] No such"),
    ],
)
def test_a_tier_that_cannot_be_made_ends_the_start(folder, wrong, said):
    settings = TieredRanks.config(folder, 1, 0, secondary_tiers=[wrong])
    worker = KVSwapTieringOffloadingSpec(settings).get_worker(caches([[(0, 64)]], [64], "cpu"))
    with pytest.raises(ValueError, match=re.escape(f"secondary_tiers[0] of {said}")):
        KVSwapTieringOffloadingSpec(settings).get_manager()
    worker.shutdown()


def test_pipelines_are_refused(folder):
    settings = TieredRanks.config(folder, 2, 0)
    parallel = replace(settings.parallel, pp_size=2, tp_size=1)
    with pytest.raises(ValueError, match="pipeline_parallel_size is 2 and prefill_context"):
        KVSwapTieringOffloadingSpec(replace(settings, parallel=parallel))


def test_metrics_are_those_of_vllm_and_of_the_tiers(folder):
    from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

    theirs = TieringOffloadingSpec.build_metric_definitions(tier(folder))
    ours = MetricsSpec.build_metric_definitions(tier(folder))
    assert {name: one for name, one in ours.items() if name.startswith("vllm:")} == theirs
    labels = MetricsSpec.config_info_keys(tier(folder))
    with serving(folder, extra=tier(folder)) as engine:
        infos = engine.manager.config_info()
    assert [one["tier"] for one in infos] == ["0:primary", "1:fs"]
    assert set().union(*infos) == set(labels)
