"""Steps of vLLM where copies are late: a layer reads what is loaded only if the step has waited for
it, and a store what is computed next unless the step has waited for the store."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm_engine import CPULoadStoreSpec, KVSwapWorker, base, caches
from vllm_serving import (
    RECOMPUTE,
    RUNNERS,
    SCHEDULERS,
    CUDAGraphMode,
    Faults,
    again,
    check,
    expected_tokens,
    never,
    prompt,
    serving,
)

from torch_kvswap.integrations.vllm.options import SpecOptions


@pytest.fixture(autouse=True)
def _late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes move when somebody waits or polls: docs/devices.md."""
    monkeypatch.setenv("KVSWAP_LATE_CPU", "1")


WAITS: dict[str, list[int | None]] = {
    "NONE": [0, 1, 2, 3],
    "PIECEWISE": [0, 1, 2, 3],
    "FULL": [None],  # a replay calls no hooks
}


@RUNNERS
@pytest.mark.parametrize("waits", [True, False], ids=["waits", "control"])
@pytest.mark.parametrize("graph", WAITS)
def test_each_layer_or_the_step_waits(tmp_path, runner, graph, waits):
    """For prompts that are loaded in the step that computes their ends."""
    old = {f"{n}": prompt(n, 60 + 20 * n) for n in range(3)}
    new, waited = again("again", old, prompt(9, 30)), list[int | None]()
    with serving(tmp_path, runner=runner) as engine:
        engine.serve(old)
        engine.forget_gpu()
        engine.runner.graph = CUDAGraphMode[graph]
        begin = engine.worker.begin_step_loads

        def begin_noted() -> Any:
            job = begin()

            def wait(layer_group: int | None) -> None:
                waited.append(layer_group)
                if waits:
                    job.wait(layer_group=layer_group)

            return job and SimpleNamespace(wait=wait)

        engine.worker.begin_step_loads = begin_noted
        engine.serve(new)
        right = [engine.tokens[name] == expected_tokens(one, 4) for name, one in new.items()]
    assert (waited, right) == (WAITS[graph], [waits] * 3)


@pytest.mark.parametrize(
    ("how", "first", "sizes"),
    [
        ("joined", [1, 2, 3], [3 * 128, None, None]),
        ("apart", [1, 0, 0], [128] * 3),  # the control
        ("not gathered", [0, 0, 0], [128] * 3),  # vLLM's own part waits for each at once
    ],
)
def test_joined_loads_land_layer_by_layer(
    how: str, first: list[int], sizes: list[int | None]
) -> None:
    """Page i is full of i + 1, and goes to block 9 + i."""
    cache = caches([[(0, 64), (1, 64)]], [64, 64], "cpu")
    layers = [one.tensor.zero_() for one in cache.tensors]
    worker = KVSwapWorker(cache, 3, 1, SpecOptions(1), layers=[["a", "b"]])

    def first_bytes() -> list[list[int]]:
        return [layer[9:12, 0].tolist() for layer in layers]

    begun: list[Any] = []
    if how != "not gathered":
        worker.gather_step_loads()
    for page in range(3):
        worker._pool.pages[page] = page + 1
        specs = CPULoadStoreSpec([page]), base.GPULoadStoreSpec([9 + page], [1], [0])
        worker.submit_load(page, *specs, expedited=True)
        if how == "apart" or page == 2:
            begun.append(worker.begin_step_loads())
            worker.gather_step_loads()
    if how != "not gathered":
        begun[0].wait(layer_group=0)
    assert first_bytes() == [first, [0, 0, 0]]
    worker.wait({0, 1, 2})
    assert first_bytes() == [[1, 2, 3]] * 2
    ended = [(one.job_id, one.success, one.transfer_size) for one in worker.get_finished()]
    assert ended == [(number, True, size) for number, size in enumerate(sizes)]
    worker.shutdown()


@RUNNERS
@SCHEDULERS
@pytest.mark.parametrize("steps", [1, 2], ids=["has not begun", "runs"])
def test_no_store_reads_the_next_owners_zeros(tmp_path, runner, is_async, steps):
    """vLLM's runner V2 writes to new blocks of a model with states before it calls the connector.
    The next prompt takes the blocks of one that is aborted while its store runs, or before."""
    first, other = prompt(1, 6 * 16 + 1), prompt(2, 9 * 16)
    how = {"blocks": 14, "transfer": RECOMPUTE, "states": True}
    with serving(tmp_path, runner=runner, is_async=is_async, **how) as engine:
        poll = engine.worker._handler.poll
        engine.worker._handler.poll = list  # waits for nothing, as on a GPU
        engine.add("old", first)
        for _ in range(steps):
            engine.step()
        engine.abort("old")
        engine.add("next", other, 1)
        while "next" not in engine.ends:
            engine.step()
        engine.worker._handler.poll = poll
        engine.run()
        engine.forget_gpu()
        seen = Faults(engine, never).seen
        engine.serve({"again": first, "next again": other})
        check(engine, {"again": first, "next again": other})
        assert seen["load"] > 0


@RUNNERS
@pytest.mark.parametrize("is_told", [True, False], ids=["told", "control"])
@pytest.mark.parametrize(
    ("steps", "states"),
    [(1, False), (2, False), (1, True)],
    ids=["has not begun", "runs", "has not begun, states"],
)
def test_stores_end_before_vllm_frees_the_cache(tmp_path, runner, steps, states, is_told):
    """Before it sleeps. LLM.sleep() waits for the GPU, but not for copies that have not begun. With
    states, runner V2 leaves none running: its steps wait for them."""
    one = prompt(1, 7 * 16)
    with serving(tmp_path, runner=runner, transfer=RECOMPUTE, states=states) as engine:
        poll, engine.worker._handler.poll = engine.worker._handler.poll, list
        engine.add("one", one, 8)
        for _ in range(steps):
            engine.step()
        assert len(engine.worker._open) == steps - 1
        if is_told:
            engine.runner.connector.unregister_kv_caches()
        engine.runner.caches["layers.0"].fill_(9)
        engine.worker._handler.poll = poll
        engine.run()
        engine.forget_gpu()
        seen = Faults(engine, never).seen
        engine.serve({"again": one})
        assert seen["load"] > 0
        assert (engine.tokens["again"] == expected_tokens(one, 4)) == is_told
