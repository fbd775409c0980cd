"""examples/nano_vllm.py on a stand-in, or on nano-vllm where it is installed. Copies are late."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import nano_standin
import pytest
import torch

import torch_kvswap as kvs

nano_standin.install()
import nano_vllm  # noqa: E402  derives from what is installed

PROMPTS = [[*range(9), n, 3 * n + 1, *range(n, n + 9)] for n in range(6)]


@pytest.fixture(autouse=True)
def _late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes move when somebody waits or polls: docs/devices.md."""
    monkeypatch.setenv("KVSWAP_LATE_CPU", "1")


class Engine(nano_vllm.HostLLM):
    def __init__(self, num_blocks: int = 100, pages: int = 100) -> None:
        super().__init__("model", pages * 2 * 8 * nano_standin.LAYERS * 4, num_blocks=num_blocks)
        self.manager = self.scheduler.block_manager
        self.prefixes = self.manager.prefixes

    def serve(self, prompts: list[list[int]]) -> list[list[int]]:
        for prompt in prompts:
            self.add_request(prompt, nano_vllm.SamplingParams(max_tokens=8, ignore_eos=True))
        done = dict[int, list[int]]()
        while not self.is_finished():
            done.update(self.step()[0])
        return [done[number] for number in sorted(done)]

    def forget_gpu(self) -> None:
        super().forget_gpu()
        self.model_runner.kv_cache.fill_(-1)

    @property
    def loaded(self) -> int:
        return self.prefixes.stats().loaded


def answers(prompts: list[list[int]]) -> list[list[int]]:
    """The tokens that nano-vllm gives without a host."""
    llm = nano_standin.LLM("model")
    return Engine.serve(llm, prompts)  # type: ignore[arg-type]


@pytest.fixture
def engine() -> Iterator[Engine]:
    made = Engine()
    assert made.serve(PROMPTS) == answers(PROMPTS)
    made.forget_gpu()
    yield made
    made.prefixes.close()


def test_prompts_come_back_from_the_host(engine: Engine) -> None:
    assert engine.serve(PROMPTS) == answers(PROMPTS)
    assert engine.loaded > 0
    before = engine.loaded
    assert engine.serve(PROMPTS) == answers(PROMPTS)
    assert engine.loaded == before  # the GPU has them


def test_preempted_requests_keep_their_blocks() -> None:
    engine = Engine(num_blocks=20)
    stored, store = list[Any](), engine.prefixes.store
    engine.prefixes.store = lambda *of, **how: (
        stored.append((store(*of, **how), how)) or stored[-1][0]
    )
    assert engine.serve(PROMPTS) == answers(PROMPTS)
    held = [of for of, how in stored if how]
    assert held
    assert all(of.lease is not None for of in held)
    del held, stored[:]
    assert engine.loaded > 0
    engine.prefixes.synchronize()
    engine.prefixes.poll()
    stats = engine.prefixes.stats()
    assert stats.free_pages + stats.idle_pages == stats.pages  # nothing is held any more


def test_a_full_host_loses_no_request() -> None:
    engine = Engine(num_blocks=20, pages=7)
    assert engine.serve(PROMPTS) == answers(PROMPTS)


def test_without_waits_for_layers_tokens_differ(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kvs.Job, "wait", lambda *_, **__: None)
    assert engine.serve(PROMPTS) != answers(PROMPTS)


def test_without_waits_for_stores_tokens_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        nano_vllm.HostBlockManager, "_allocate_block", nano_vllm.BlockManager._allocate_block
    )
    engine = Engine(num_blocks=20)
    assert engine.serve(PROMPTS) != answers(PROMPTS)


def damage(engine: Engine) -> None:
    pages = engine.prefixes.pools[0].pages.view(torch.uint8)
    pages.view(-1)[::7] ^= 1


def test_damaged_pages_are_computed_again(engine: Engine) -> None:
    damage(engine)
    assert engine.serve(PROMPTS) == answers(PROMPTS)
    engine.forget_gpu()
    before = engine.loaded
    assert engine.serve(PROMPTS) == answers(PROMPTS)  # what was stored again
    assert engine.loaded > before


def test_damaged_pages_stop_the_simple_scheduler(engine: Engine) -> None:
    engine.scheduler.restart = nano_vllm.HostScheduler.restart.__get__(engine.scheduler)
    damage(engine)
    with pytest.raises(RuntimeError, match="a load failed"):
        engine.serve(PROMPTS)
