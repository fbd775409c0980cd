"""KVSwapConnector under vLLM's real scheduler: loaded by configuration, and no failure ends it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm_engine import OffloadingConnectorScheduler, OffloadingConnectorStats
from vllm_serving import (
    BLOCK,
    CHUNKS,
    CONNECTOR,
    MULTI,
    PROMPTS,
    RECOMPUTE,
    RUNNERS,
    SCHEDULERS,
    Faults,
    Serving,
    again,
    check,
    never,
    only,
    prompt,
    serving,
)

from torch_kvswap.integrations.vllm.scheduler_side import FAILURES, PAGES
from torch_kvswap.integrations.vllm.spec import KVSwapOffloadingSpec
from torch_kvswap.results import DeviceLostError


@pytest.fixture(params=["sync", "async"])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Serving]:
    with serving(tmp_path, is_async=request.param == "async", transfer=RECOMPUTE) as engine:
        yield engine


@RUNNERS
@SCHEDULERS
@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize(
    ("policy", "new_tokens", "loads"),
    [("recompute", 0, 5), ("fail", 0, 1), ("fail", 40, 1)],
    ids=["before the step", "in the step", "in the step with new tokens"],
)
def test_prompts_come_back_from_the_host(
    tmp_path, runner, is_async, drafts, policy, new_tokens, loads
):
    new = again("again", PROMPTS, prompt(9, new_tokens))
    how = {"drafts": drafts, "transfer": {"kv_load_failure_policy": policy}}
    with serving(tmp_path, runner=runner, is_async=is_async, **how) as engine:
        engine.serve(PROMPTS, 40)
        engine.forget_gpu()
        seen = Faults(engine, never).seen
        engine.serve(new)
        check(engine, PROMPTS, 40)
        check(engine, new)
        assert seen["load"] == loads


@RUNNERS
@SCHEDULERS
def test_a_decoding_step_loads_what_it_hides(tmp_path, runner, is_async):
    """One that decodes for nobody loads as much as vLLM's largest step hides, and none loads more."""
    prompts = {f"{n}": prompt(n, 257) for n in range(3)}
    longer = again("longer", prompts, prompt(9, 20))
    largest = {"largest": prompt(4, 544)}
    too_long = again("too", largest, prompt(9, 60))
    with serving(tmp_path, runner=runner, is_async=is_async, batched=32) as engine:
        engine.serve(prompts)
        engine.serve(largest)
        begin, in_step = engine.worker.begin_step_loads, []

        def begin_counted() -> Any:
            in_step.extend(engine.worker._step_loads)
            return begin()

        engine.worker.begin_step_loads = begin_counted
        for name, more, is_decoding, requests in (
            ("idle", prompts, False, 2),  # of 256 tokens each
            ("decoding", prompts, True, 0),
            ("longer", longer, True, 3),
            ("too long", too_long, True, 0),  # 512 are the most
        ):
            engine.forget_gpu()
            if is_decoding:
                engine.start_decoding()
            in_step.clear()
            engine.serve(again(name, more))
            check(engine, again(name, more))
            assert (name, len(in_step)) == (name, requests)


@RUNNERS
def test_loads_inside_a_chunk_are_not_joined(tmp_path, runner):
    """Two prompts begin in the middle of a chunk, because the GPU has their first three blocks."""
    old = {f"{n}": prompt(n, 129) for n in range(3)}
    new = again("new", old, prompt(9, 20))
    with serving(tmp_path, runner=runner, extra={"blocks_per_chunk": 2}) as engine:
        engine.serve(old)
        engine.forget_gpu()
        engine.serve({f"begin {n}": old[f"{n}"][:49] for n in range(2)})
        loads = Faults(engine, never)
        engine.serve(new)
        assert loads.seen["load"] == 3
        check(engine, new)


def test_hits_are_counted_as_vllm_does(tmp_path):
    with serving(tmp_path) as engine:
        part = engine.scheduler.connector.connector_scheduler
        count, theirs = part.get_external_cache_hit_sources, OffloadingConnectorScheduler
        counts = list[Any]()

        def counted(*of: Any) -> Any:
            counts.append((count(*of), theirs.get_external_cache_hit_sources(part, *of)))
            return counts[-1][0]

        part.get_external_cache_hit_sources = counted
        engine.serve(PROMPTS)
        engine.forget_gpu()
        engine.serve(again("again"))
        assert [ours for ours, _ in counts] == [theirs for _, theirs in counts]
        assert sum(number for ours, _ in counts for number in ours.values()) == CHUNKS * BLOCK


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({}, "layer by layer in the step that computes the rest"),
        ({"drafts": 3}, "waits for all layers, because decoding is speculative"),
        ({"transfer": RECOMPUTE}, "because kv_load_failure_policy is 'recompute'"),
        ({"window": 40}, "because the model has several groups of layers, a sliding window or"),
        ({"states": True}, "vLLM's runner V2 writes to new blocks of this model before stores"),
    ],
)
def test_one_line_says_what_engines_get(tmp_path, caplog, how, said):
    name = "torch_kvswap.integrations.vllm.connector"
    caplog.set_level("INFO", name)
    with serving(tmp_path, **how):
        (line,) = [one.getMessage() for one in caplog.records if one.name == name]
    assert line.startswith("KVSwapConnector loads prompts ")
    assert said in line


@RUNNERS
@SCHEDULERS
@pytest.mark.parametrize(
    ("how", "window", "blocks"), [(True, None, 18), ("rejected", None, 18), (True, 40, 9)]
)
def test_what_could_not_be_loaded_is_computed_again(
    tmp_path, runner, is_async, how, window, blocks
):
    """And stored again."""
    setting = {"runner": runner, "is_async": is_async, "window": window}
    prompts = {f"{n}": prompt(n, 90 + 16 * n) for n in range(3)}
    second, third = again("again", prompts), again("third", prompts)
    with serving(tmp_path, transfer=RECOMPUTE, **setting) as engine:
        engine.serve(prompts)
        engine.forget_gpu()
        faults = Faults(engine, only("load", how))
        engine.serve(second)
        assert faults.count == {"store": 0, "load": 3}, "what failed is not found again"
        faults.chooses = never
        engine.forget_gpu()
        loaded = engine.manager._blocks.stats().loaded
        engine.serve(third)
        assert engine.manager._blocks.stats().loaded - loaded == blocks
        check(engine, {**prompts, **second, **third})


@RUNNERS
@SCHEDULERS
def test_a_child_of_multiconnector_survives_failed_loads(tmp_path, runner, is_async, caplog):
    """The engine computes again, though the child's own policy is "fail", the default."""
    caplog.set_level("INFO", "torch_kvswap")
    child = {**CONNECTOR, "kv_role": "kv_both"}
    child["kv_connector_extra_config"] = {"cpu_bytes_to_use": 1 << 20}
    how: dict[str, Any] = {"transfer": MULTI | RECOMPUTE, "extra": {"connectors": [child]}}
    new = again("again", PROMPTS, prompt(9, 40))
    with serving(tmp_path, runner=runner, is_async=is_async, **how) as engine:
        engine.serve(PROMPTS)
        engine.forget_gpu()
        faults = Faults(engine, only("load"))
        engine.serve(new)
        check(engine, new)
        assert faults.count["load"] == len(PROMPTS)
    assert "before the step that computes the rest, because another connector" in caplog.text


@RUNNERS
@SCHEDULERS
@pytest.mark.parametrize(
    ("new", "how", "fails"),
    [
        (0, True, ["again first"]),
        (50, "rejected", ["again second"]),  # its last block is that of the step's load
        (50, True, ["again first", "again second"]),  # both are in the load that failed
    ],
    ids=["asynchronous", "a block in the step", "in the step"],
)
def test_only_requests_of_the_load_fail(tmp_path, runner, is_async, new, how, fails):
    prompts = {"first": prompt(1, 100), "second": prompt(2, 84)}
    with serving(tmp_path, runner=runner, is_async=is_async) as engine:
        engine.serve(prompts)
        engine.forget_gpu()
        faults = Faults(
            engine, lambda direction, blocks: direction == "load" and blocks > 5 and how
        )
        longer = again("again", prompts, prompt(3, new))
        worker, get_finished = engine.worker, engine.worker.get_finished

        def get_waited_for() -> Any:
            """As on a GPU, where a copy may end after its step."""
            ended, worker._ended = worker._ended, []
            return ended

        if new:
            worker.get_finished = get_waited_for
        else:
            engine.start_decoding()
        engine.serve(longer)
        worker.get_finished = get_finished
        assert faults.seen["load"] == (1 if new else 2)
        for name, one in longer.items():
            if name in fails:
                assert (engine.ends[name], engine.tokens[name]) == ("error", [])
            else:
                check(engine, {name: one})
        faults.chooses = never
        engine.serve(again("third", longer))
        check(engine, again("third", longer))


@RUNNERS
@pytest.mark.parametrize("is_aborted", [False, True])
def test_nothing_computed_from_a_failed_load_stays(tmp_path, runner, is_aborted):
    """Neither on the host nor in the prefix cache of the GPU. vLLM hears of the failure when the
    next step runs, or when the request is gone."""
    old = {"old": prompt(1, 100)}
    new = again("new", old, prompt(2, 50))
    with serving(tmp_path, runner=runner, is_async=True, batched=32) as engine:
        engine.serve(old)
        engine.forget_gpu()
        faults = Faults(engine, only("load"))
        for name, tokens in new.items():
            engine.add(name, tokens)
            engine.step()
            assert faults.count["load"] == 1
            if is_aborted:
                engine.abort(name)
        engine.run()
        faults.chooses = never
        for turn in ("third", "fourth"):
            engine.serve(again(turn, new))
            check(engine, again(turn, new))
            engine.forget_gpu()


def test_metrics_count_failures_and_pages(engine):
    part, said = engine.scheduler.connector.connector_scheduler, OffloadingConnectorStats()
    get_stats = part.get_stats
    part.get_stats = lambda: said.aggregate(get_stats())
    faults = Faults(engine, only("store", "rejected"))
    engine.serve({"lost": prompt(1, 97)})
    faults.chooses = never
    engine.serve({"kept": prompt(2, 97)})
    engine.forget_gpu()
    faults.chooses = only("load")
    engine.serve({"again": prompt(2, 100)})
    numbers = said.reduce()
    failures = {name: count for name, count in numbers.items() if name.startswith(FAILURES)}
    assert failures == {
        f"{FAILURES}:('store', 'rejected')": 1,
        f"{FAILURES}:('load', 'failed')": 1,
    }
    states = {state: numbers[f"{PAGES}:('{state}',)"] for state in ("free", "used", "in_flight")}
    assert states == {"free": 256 - 11, "used": 11, "in_flight": 0}
    defined = KVSwapOffloadingSpec.build_metric_definitions({})
    assert [len(defined[one].labelnames) for one in (FAILURES, PAGES)] == [2, 1]


@pytest.mark.parametrize("error", [MemoryError("none"), RuntimeError("the pool is closed")])
def test_transfers_that_cannot_start_have_failed(engine, error, caplog):
    handler, one = engine.worker._handler, prompt(1, 100)
    engine.serve({"first": one})
    engine.forget_gpu()
    load, store = handler.load, handler.store

    def cannot(**_: Any) -> Any:
        raise error

    handler.load = handler.store = cannot
    other = prompt(2, 70)
    engine.serve({"again": one, "other": other})
    handler.load, handler.store = load, store
    engine.forget_gpu()
    engine.serve({"third": one})
    check(engine, {"again": one, "other": other, "third": one})
    assert f"could not start: {error}" in caplog.text


def test_a_lost_device_ends_the_engine(engine):
    def lost(**_: Any) -> Any:
        raise DeviceLostError("error 719")

    engine.worker._handler.store = lost
    with pytest.raises(DeviceLostError):
        engine.serve({"first": prompt(1, 100)})


@pytest.mark.parametrize("tier_hangs", [False, True])
def test_a_larger_request_blocks_no_failed_one(tmp_path, tier_hangs):
    """vLLM still reserves its blocks. What it would find in a tier is not waited for."""
    begin, large, one = prompt(1, 16), prompt(2, 208), prompt(3, 112)
    old = {"begin": begin, "large": [*begin, *large], "one": one}
    new = again("new", old, prompt(4, 20))
    with serving(tmp_path, blocks=20, transfer=RECOMPUTE) as engine:
        for name, tokens in old.items():
            engine.serve({name: tokens})
        engine.forget_gpu()
        worker, get_finished = engine.worker, engine.worker.get_finished
        worker.get_finished = lambda: worker.wait(set(worker._open)) or get_finished()
        faults = Faults(engine, lambda direction, blocks: direction == "load" and blocks == 7)
        part = engine.scheduler.connector.connector_scheduler
        lookup = part._lookup

        def lookup_slowly(status: Any, *more: Any) -> Any:
            hangs = tier_hangs and faults.count["load"] and status.req.request_id == "new one"
            return None if hangs else lookup(status, *more)

        part._lookup = lookup_slowly
        engine.serve(new)
        check(engine, new)
        assert faults.count["load"] == 1
