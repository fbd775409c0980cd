"""Pages that were damaged after their store, under vLLM's real scheduler: no answer is computed from
them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from vllm_serving import Serving, expected_tokens, serving

RUNNERS = pytest.mark.parametrize("runner", ["v1", "v2"])
SCHEDULERS = pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
# Two pages of the first prompt are damaged. The second one is loaded in the same step.
OLD = {name: random.Random(name).choices(range(512), k=97) for name in ("damaged", "whole")}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


def serve_damaged(engine: Serving, new: int) -> dict[str, list[int]]:
    """Serves prompts from the host, with so many new tokens, whose pages were damaged meanwhile. The
    prompts by name."""
    engine.serve(OLD)
    engine.forget_gpu()
    pages = engine.worker._pool.pages
    manager = engine.scheduler.connector.connector_scheduler.manager
    hashes = engine.requests["damaged"].block_hashes
    for block in (2, 4):
        (page,) = (
            page for page, key in enumerate(manager._last_on_page) if key.startswith(hashes[block])
        )
        pages[page, 0, 1000] ^= 4
    again = {f"{name} again": one + [7] * new for name, one in OLD.items()}
    if not new:
        engine.start_decoding()
    engine.serve(again)
    return again


def is_right(engine: Serving, prompts: dict[str, list[int]], name: str) -> bool:
    return engine.tokens[name] == expected_tokens(prompts[name], 4)


def loaded(engine: Serving) -> int:
    stats = engine.scheduler.connector.connector_scheduler.manager._blocks.stats()
    return int(stats.loaded)


@RUNNERS
@SCHEDULERS
@pytest.mark.parametrize("verify", ["load", "order"])
def test_a_damaged_page_is_computed_again_and_stored_again(folder, runner, is_async, verify):
    how: dict[str, Any] = {"transfer": {"kv_load_failure_policy": "recompute"}}
    how |= {"runner": runner, "is_async": is_async, "extra": {"verify": verify}}
    with serving(folder, **how) as engine:
        assert engine.worker._pool.verify == verify
        again = serve_damaged(engine, new=0)
        assert all(is_right(engine, again, name) for name in again)
        assert engine.worker._handler.metrics().loads.corrupted_blocks == 2
        assert loaded(engine) == 2 * 6 - 2
        engine.forget_gpu()
        third = {f"third {name}": one for name, one in again.items()}
        engine.serve(third)
        assert all(is_right(engine, third, name) for name in third)
        assert loaded(engine) == 4 * 6 - 2
        assert engine.worker._handler.metrics().loads.corrupted_blocks == 2


@RUNNERS
@SCHEDULERS
@pytest.mark.parametrize("new", [0, 40], ids=["before the step", "in the step"])
def test_with_the_policy_fail_only_the_request_of_a_damaged_page_fails(
    folder, runner, is_async, new
):
    with serving(folder, runner=runner, is_async=is_async, extra={"verify": "load"}) as engine:
        again = serve_damaged(engine, new)
        assert engine.ends["damaged again"] == "error"
        assert engine.tokens["damaged again"] == []
        assert is_right(engine, again, "whole again")
        third = {f"third {name}": one for name, one in again.items()}
        for _ in range(2):  # what is computed again is stored again
            engine.forget_gpu()
            engine.serve(third)
            assert all(is_right(engine, third, name) for name in third)


@pytest.mark.parametrize("new", [0, 40], ids=["before the step", "in the step"])
def test_without_digests_the_answer_is_wrong(folder, new):
    """The control of the tests above."""
    with serving(folder) as engine:
        again = serve_damaged(engine, new)
        assert engine.ends["damaged again"] == "length"
        assert not is_right(engine, again, "damaged again")
        assert is_right(engine, again, "whole again")


@SCHEDULERS
def test_under_the_connector_of_vllm_a_damaged_page_ends_the_engine(folder, is_async, caplog):
    own = {"kv_connector": "OffloadingConnector", "kv_connector_module_path": None}
    spec = {"spec_name": "KVSwapOffloadingSpec"}
    spec |= {"spec_module_path": "torch_kvswap.integrations.vllm", "verify": "load"}
    with serving(folder, is_async=is_async, transfer=own, extra=spec) as engine:
        with pytest.raises(AssertionError):
            serve_damaged(engine, new=0)
        assert engine.tokens["damaged again"] == []
    assert "2 of 6 blocks are not what was stored (positions 2, 4)" in caplog.text
    assert "vLLM ends the engine" in caplog.text
