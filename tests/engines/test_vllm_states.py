"""Models with states: vLLM's runner V2 writes to new blocks before it calls the connector."""

from __future__ import annotations

import pytest
from vllm_serving import (
    RECOMPUTE,
    RUNNERS,
    SCHEDULERS,
    Faults,
    check,
    never,
    prompt,
    serving,
)

OLD = prompt(1, 6 * 16 + 1)


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
        engine.add("old", OLD)
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
        engine.serve({"again": OLD, "next again": prompt(2, 9 * 16)})
        check(engine, {"again": OLD, "next again": prompt(2, 9 * 16)})
        assert seen["load"] > 0
