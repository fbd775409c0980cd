"""Steps of vLLM where copies are late: a layer reads what is loaded only if the step has waited for
it, and a store what is computed next unless the step has waited for the store."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm_engine import CPULoadStoreSpec, KVSwapWorker, base, caches
from vllm_serving import (
    RECOMPUTE,
    RUNNERS,
    SCHEDULERS,
    CUDAGraphMode,
    Faults,
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


PROMPTS = {n: random.Random(n).choices(range(512), k=60 + 20 * n) for n in range(3)}
LONGER = {n: [*one, *random.Random(n + 9).choices(range(512), k=30)] for n, one in PROMPTS.items()}
WAITS: dict[str, list[int | None]] = {
    "NONE": [0, 1, 2, 3],
    "PIECEWISE": [0, 1, 2, 3],
    "FULL": [None],  # a replay calls no hooks
}


def serve_again(
    folder: Path, runner: str, graph: str, wait: Callable[[Any, int | None], None]
) -> tuple[list[int | None], list[bool]]:
    """Serves longer prompts behind their beginnings, which are loaded in a step. wait: called for
    each wait of the step. Returns the layer groups that it waited for, and which tokens are right.
    """
    with serving(folder, runner=runner) as engine:
        engine.serve({f"{n}": one for n, one in PROMPTS.items()})
        engine.forget_gpu()
        engine.runner.graph = CUDAGraphMode[graph]
        worker, waited = engine.runner.connector.connector_worker.worker, list[int | None]()
        begin = worker.begin_step_loads

        class Noted:
            def __init__(self, job: Any) -> None:
                self.job = job

            def wait(self, layer_group: int | None) -> None:
                waited.append(layer_group)
                wait(self.job, layer_group)

        def begin_noted() -> Any:
            job = begin()
            return job and Noted(job)

        worker.begin_step_loads = begin_noted
        engine.serve({f"again {n}": one for n, one in LONGER.items()})
        right = [
            engine.tokens[f"again {n}"] == expected_tokens(one, 4) for n, one in LONGER.items()
        ]
    return waited, right


@RUNNERS
@pytest.mark.parametrize("graph", WAITS)
def test_each_layer_or_the_step_waits(runner: str, graph: str, tmp_path: Path) -> None:
    def wait(job: Any, layer_group: int | None) -> None:
        job.wait(layer_group=layer_group)

    assert serve_again(tmp_path, runner, graph, wait) == (WAITS[graph], [True] * 3)


@pytest.mark.parametrize("graph", ["PIECEWISE", "FULL"])
def test_without_the_waits_a_step_reads_old_bytes(graph: str, tmp_path: Path) -> None:
    """The control of the test above."""
    said = serve_again(tmp_path, "v2", graph, lambda job, layer_group: None)
    assert said == (WAITS[graph], [False] * 3)


def loads() -> tuple[Any, list[torch.Tensor], dict[int, Any]]:
    """A worker, its layers, and loads: page i is full of i + 1, and goes to block 9 + i."""
    cache = caches([[(0, 64), (1, 64)]], [64, 64], "cpu")
    layers = [one.tensor for one in cache.tensors]
    worker = KVSwapWorker(cache, 3, 1, SpecOptions(1), layers=[["a", "b"]])
    for page in range(3):
        worker._pool.pages[page] = page + 1
    for layer in layers:
        layer.zero_()
    jobs = {
        page: (CPULoadStoreSpec([page]), base.GPULoadStoreSpec([9 + page], [1], [0]))
        for page in range(3)
    }
    return worker, layers, jobs


def first_bytes(layers: list[torch.Tensor]) -> list[list[int]]:
    return [layer[9:12, 0].tolist() for layer in layers]


@pytest.mark.parametrize(
    ("how", "first", "sizes"),
    [
        ("joined", [1, 2, 3], [3 * 128, None, None]),
        ("apart", [1, 0, 0], [128] * 3),  # the control
    ],
)
def test_joined_loads_land_layer_by_layer(
    how: str, first: list[int], sizes: list[int | None]
) -> None:
    worker, layers, jobs = loads()
    begun: list[Any] = []
    worker.gather_step_loads()
    for page, specs in jobs.items():
        worker.submit_load(page, *specs, expedited=True)
        if how == "apart" or page == 2:
            begun.append(worker.begin_step_loads())
            worker.gather_step_loads()
    begun[0].wait(layer_group=0)
    assert first_bytes(layers) == [first, [0, 0, 0]]
    worker.wait(set(jobs))
    assert first_bytes(layers) == [[1, 2, 3]] * 2
    ended = [(one.job_id, one.success, one.transfer_size) for one in worker.get_finished()]
    assert ended == [(number, True, size) for number, size in enumerate(sizes)]
    worker.shutdown()


def test_an_expedited_load_that_nobody_gathers_begins() -> None:
    """As vLLM's own part of the connector makes it, which waits for it at once."""
    worker, layers, jobs = loads()
    for number, specs in jobs.items():
        worker.submit_load(number, *specs, expedited=True)
    worker.wait(set(jobs))
    assert first_bytes(layers) == [[1, 2, 3]] * 2
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
