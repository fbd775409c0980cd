"""Pages that were damaged after their store, under vLLM's real scheduler: no answer is computed from
them."""

from __future__ import annotations

import pytest
from vllm_serving import (
    BLOCK,
    RECOMPUTE,
    RUNNERS,
    SCHEDULERS,
    Faults,
    Serving,
    again,
    check,
    never,
    prompt,
    serving,
)

# Two pages of the first prompt are damaged. The second one is loaded in the same step.
OLD = {"damaged": prompt(1, 97), "whole": prompt(2, 97)}


def serve_damaged(engine: Serving, new: int) -> dict[str, list[int]]:
    """Serves prompts from the host, with so many new tokens, whose pages were damaged meanwhile. The
    prompts by name."""
    engine.serve(OLD)
    engine.forget_gpu()
    hashes = engine.requests["damaged"].block_hashes
    for block in (2, 4):
        (page,) = (
            page
            for page, key in enumerate(engine.manager._last_on_page)
            if key.startswith(hashes[block])
        )
        engine.worker._pool.pages[page, 0, 1000] ^= 4
    prompts = again("again", OLD, [7] * new)
    if not new:
        engine.start_decoding()
    engine.serve(prompts)
    return prompts


def loaded(engine: Serving) -> int:
    return int(engine.manager._blocks.stats().loaded)


@RUNNERS
@SCHEDULERS
@pytest.mark.parametrize(("policy", "new"), [("recompute", 0), ("fail", 0), ("fail", 40)])
def test_no_answer_is_of_damaged_pages(tmp_path, runner, is_async, policy, new):
    """Only the request of these pages fails, or is computed again."""
    how = {"transfer": {"kv_load_failure_policy": policy}, "extra": {"verify": "load"}}
    with serving(tmp_path, runner=runner, is_async=is_async, **how) as engine:
        prompts = serve_damaged(engine, new)
        if policy == "fail":
            assert engine.ends["again damaged"] == "error"
            assert engine.tokens["again damaged"] == []
        else:
            check(engine, prompts)
        check(engine, {"again whole": prompts["again whole"]})
        for turn in range(2):  # what is computed again is stored again
            engine.forget_gpu()
            before = loaded(engine)
            engine.serve(again(turn, prompts))
            check(engine, again(turn, prompts))
        assert loaded(engine) - before == sum(len(one) // BLOCK for one in prompts.values())


# Models with states: vLLM's runner V2 writes to new blocks before it calls the connector.


FIRST = prompt(1, 6 * 16 + 1)


@RUNNERS
@SCHEDULERS
@pytest.mark.parametrize("steps", [1, 2], ids=["has not begun", "runs"])
def test_no_store_reads_the_next_owners_zeros(tmp_path, monkeypatch, runner, is_async, steps):
    """The next prompt takes the blocks of one that is aborted while its store runs, or before."""
    monkeypatch.setenv("KVSWAP_LATE_CPU", "1")  # a copy reads when somebody waits for it
    how = {"blocks": 14, "transfer": RECOMPUTE, "states": True}
    with serving(tmp_path, runner=runner, is_async=is_async, **how) as engine:
        poll = engine.worker._handler.poll
        engine.worker._handler.poll = list  # waits for nothing, as on a GPU
        engine.add("old", FIRST)
        for _ in range(steps):
            engine.step()
        engine.abort("old")
        engine.add("next", prompt(2, 9 * 16), 1)
        while "next" not in engine.ends:
            engine.step()
        engine.worker._handler.poll = poll
        engine.run()
        engine.forget_gpu()
        seen = Faults(engine, never).seen
        engine.serve({"again": FIRST, "next again": prompt(2, 9 * 16)})
        check(engine, {"again": FIRST, "next again": prompt(2, 9 * 16)})
        assert seen["load"] > 0
