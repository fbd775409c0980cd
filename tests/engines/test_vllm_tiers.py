"""vLLM's secondary tiers under its real scheduler, with our worker on its host memory."""

from __future__ import annotations

import contextlib
from typing import Any
from unittest import mock

import pytest
from patience import in_time
from prometheus_client import Counter, Gauge, Histogram
from vllm_contract import KVSwapWorker, caches
from vllm_engine import KVConnectorFactory, config, folder
from vllm_serving import (
    BLOCK,
    PROMPTS,
    RECOMPUTE,
    SCHEDULERS,
    THEIRS,
    Faults,
    Serving,
    again,
    check,
    expected_tokens,
    never,
    prompt,
    serving,
)
from vllm_tiers import tier, without_gpu

from torch_kvswap.integrations.vllm.scheduler_side import FAILURES
from torch_kvswap.integrations.vllm.spec import KVSwapOffloadingSpec
from torch_kvswap.integrations.vllm.tiering import KVSwapTieringSpec

__all__ = ["folder"]
OWN = {"spec_name": "TieringOffloadingSpec"}  # vLLM's own, under its own connector


@pytest.fixture(autouse=True)
def _without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    without_gpu(monkeypatch)


def of_tier(engine: Serving) -> Any:
    return engine.manager.secondary_tiers[0]


class Promoted:
    """Counts the chunks that an engine reads from its tier."""

    def __init__(self, engine: Serving) -> None:
        self.count, self._submit = 0, of_tier(engine).submit_load
        of_tier(engine).submit_load = self

    def __call__(self, job: Any) -> None:
        self.count += len(job.keys)
        self._submit(job)


def nothing_is_held(engine: Serving) -> bool:
    """No chunk is pinned by a transfer."""
    usage = engine.manager.primary_tier.get_stats().reduce()
    return bool(usage["vllm:kv_offload_cpu_cache_usage_perc"] == 0)


@SCHEDULERS
@pytest.mark.parametrize(
    ("more", "how", "is_ours"),
    [
        ({}, {}, True),
        ({"eviction_policy": "arc"}, {}, True),
        ({}, {"cache": "mla"}, True),
        ({"canonical_layout": True}, {"cache": "fp8"}, True),
        ({}, {"workers": 2}, True),
        ({}, {"workers": 2, "cache": "mla"}, True),  # one copy for both
        ({}, {"states": True}, True),
        ({"blocks_per_chunk": 2}, {}, False),
        ({"canonical_layout": True}, {"workers": 2, "heads": 2}, False),
    ],
)
def test_vllms_worker_and_ours_share_chunks(folder, caplog, more, how, is_ours, is_async):
    """One stores, the next one finds everything, and a third one that is restarted."""
    caplog.set_level("INFO", "torch_kvswap")
    extra = tier(folder, **more)
    expected = sum(
        len(one) // (BLOCK * extra.get("blocks_per_chunk", 1)) for one in PROMPTS.values()
    )
    found, longer = [], again("longer", PROMPTS, prompt(9, 40))
    for theirs in (False, True, False):
        options = {"extra": extra | OWN, "transfer": THEIRS} if theirs else {"extra": extra}
        with serving(folder, is_async=is_async, **options, **how) as engine:
            assert all(isinstance(one, KVSwapWorker) for one in engine.workers) == (
                is_ours and not theirs
            )
            promoted = Promoted(engine)
            engine.serve(longer if theirs else PROMPTS)
            check(engine, longer if theirs else PROMPTS)
            assert engine.agree
            found.append(promoted.count)
            assert nothing_is_held(engine)
    of_states = 2 if "states" in how else 1
    assert found[0] == 0
    assert found[1] >= expected
    assert expected <= found[2] <= of_states * expected
    assert ("vLLM's own worker moves the KV-cache blocks, because" in caplog.text) != is_ours


CACHES = {  # groups of layers, as (tensor, bytes used), and bytes of the rows of each tensor
    "plain": ([[(0, 4096), (1, 4096)]], [4096, 4096], {}, ""),
    "one tensor": ([[(0, 8192)], [(0, 8192)]], [8192], {}, ""),
    "shared": ([[(0, 4096), (1, 4096)], [(0, 4096), (1, 2048)]], [4096, 4096], {}, ""),
    "padded": ([[(0, 4000), (1, 4096)]], [4096, 4096], {}, "tensor 1 lies at byte 4096, not 4000"),
    "apart": ([[(0, 4096)], [(1, 4096)]], [4096, 4096], {}, "tensor 1 lies at byte 4096, not 0"),
    "chunks": ([[(0, 4096)]], [4096], {"chunk": 3}, "3 blocks of a layer lie one after"),
}


@pytest.mark.parametrize("name", CACHES)
def test_our_worker_or_vllms_own_moves_blocks(tmp_path, caplog, name):
    caplog.set_level("INFO", "torch_kvswap")
    groups, rows, how, why = CACHES[name]
    how |= tier(tmp_path, cpu_bytes_to_use=1 << 20, windows=(None,) * len(groups))
    spec = KVSwapTieringSpec(config(block_bytes=sum(rows), **how))
    worker = spec.get_worker(caches(groups, rows, "cpu"))
    assert isinstance(worker, KVSwapWorker) == (not why)
    said = [one for one in caplog.messages if "vLLM's own worker" in one]
    assert len(said) == bool(why)
    assert why in "".join(said)
    worker.shutdown()


@pytest.mark.parametrize("has_tier", [False, True])
def test_a_reset_stores_no_reused_blocks(folder, has_tier):
    """Other requests were given blocks that have left the window of a running one."""
    old, window = prompt(1, 6 * BLOCK), 40
    new = [*old, *prompt(2, 30)]
    how = {"window": window, "blocks": 11, "extra": tier(folder) if has_tier else {}}
    with serving(folder, **how) as engine:
        engine.add("running", old, 30)
        assert in_time(lambda: engine.step() or len(engine.tokens["running"]) == 9)
        for number in range(7):  # too short for a lookup
            engine.add(f"{number}", prompt(number, BLOCK - 1), 1)
        engine.step()
        engine.add("waiting", new)  # for more blocks than are free
        assert not engine.scheduler.reset_prefix_cache(reset_connector=True), "a request runs"
        engine.run()
        engine.forget_gpu()
        seen = Faults(engine, never).seen
        engine.serve({"again": new})
        assert seen["load"] == 1, "what waited at the reset has stored its chunks"
        for name in ("waiting", "again"):
            assert engine.tokens[name] == expected_tokens(new, 4, window), name


@pytest.mark.parametrize(
    ("most", "resets", "stores"),
    [(None, False, 3), (None, True, 0), (33, False, 2), (0, False, 0)],
    ids=["control", "reset", "limit", "limit of 0"],
)
def test_who_may_store_no_part_of_a_block(folder, most, resets, stores):
    """Prefixes may end inside a block of states, which vLLM stores before others write to it."""
    with serving(folder, states=True, match_unit=BLOCK // 2) as engine:
        engine.add("one", prompt(1, 2 * BLOCK + 13), 8, {"max_offload_tokens": most})
        seen = Faults(engine, never).seen
        engine.step()
        if resets:
            assert not engine.scheduler.reset_prefix_cache(reset_connector=True), "a request runs"
        engine.run()
        assert seen["store"] == stores


@pytest.mark.parametrize("offers_parts", [False, True], ids=["whole blocks", "control"])
def test_no_lookup_evicts_what_it_has_found(folder, caplog, offers_parts):
    """With parts, a tier that answers at once has the end of the prompt. The host, which is full,
    makes room for it with a block that the same lookup has counted."""
    caplog.set_level("INFO", "torch_kvswap")
    old, extra = prompt(1, 2 * BLOCK + 13), {"secondary_tiers": [{"type": "example"}]}
    how = {"states": True, "match_unit": BLOCK // 2, "pages": 5, "extra": extra}
    with serving(folder, **how) as engine:
        part = engine.scheduler.connector.connector_scheduler
        if offers_parts:
            part.config = part.config._replace(supports_partial_tail=True)
        engine.serve({"old": old})
        engine.serve({"other": prompt(2, BLOCK + 1)})  # takes the places of parts
        engine.forget_gpu()
        seen = Faults(engine, never).seen
        ends_engine = pytest.raises(AssertionError, match="not found in cache")
        with ends_engine if offers_parts else contextlib.nullcontext():
            engine.serve({"again": old})
            check(engine, {"again": old})
            assert seen["load"] == 1
    assert "secondary_tiers keep whole blocks only" in caplog.text


@pytest.mark.parametrize("is_told", [True, False], ids=["told", "control"])
def test_a_tier_fills_pages_of_failed_stores(folder, monkeypatch, is_told):
    """The host has one page. What the worker knows of it is older."""
    monkeypatch.setenv("KVSWAP_LATE_CPU", "1")  # a copy begins when somebody waits for it
    old, other = {"old": prompt(1, 17)}, {"other": prompt(2, 17)}
    how = {"extra": tier(folder), "transfer": RECOMPUTE, "pages": 1}
    with serving(folder, **how) as engine:
        handler, store = engine.worker._handler, engine.worker._handler.store
        if not is_told:
            engine.worker._has_writers = False
        engine.serve(old)
        assert in_time(lambda: len([*folder.rglob("rows/**/*.bin")]) == 1)

        def fail(**ids: Any) -> Any:
            job = store(**ids)
            handler.cancel(job)
            return job

        handler.store = fail
        engine.serve(other)
        handler.store = store
        engine.forget_gpu()
        engine.serve(again("again", old))
        check(engine, again("again", old))
        loads = engine.worker._handler.metrics().loads
        assert (loads.done, loads.failed) == ((1, 0) if is_told else (0, 1))


@pytest.mark.parametrize("has_tiers", [False, True])
def test_the_front_end_knows_each_metric(folder, has_tiers):
    """In another process, with a configuration that nobody has completed."""
    extra = tier(folder) if has_tiers else {"store_threshold": 2}
    with serving(folder, extra=extra) as engine:
        engine.serve(PROMPTS)
        said = {*engine.manager.get_stats().reduce(), FAILURES}
        labels = set().union(*engine.manager.config_info())
        transfer = engine.config.kv_transfer_config
        transfer.kv_connector_extra_config = {"cpu_bytes_to_use": 1, **extra}
        types = {kind: mock.MagicMock() for kind in (Counter, Gauge, Histogram)}
        made = KVConnectorFactory.get_connector_class(transfer).build_prom_metrics(
            engine.config, types, ["model"], {0: ["m"]}
        )
    known = tuple(made._offloading_metric_metadata)
    assert [name for name in said if not name.startswith(known)] == []
    assert labels == set(KVSwapOffloadingSpec.config_info_keys(extra))
