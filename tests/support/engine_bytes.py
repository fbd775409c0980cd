"""What an engine stores and loads, byte by byte, on any device. CHECKS has all of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from drained import drain
from prefix_server import PrefixServer, prompt
from torch import Tensor

from torch_kvswap import BlockGroup, HostPool, OffloadEngine, OffloadHandler, PagedLayout, Result

BLOCKS, PAGES = 16, 6


def make(
    device: str = "cpu", per_page: int = 1, pages: int = PAGES, **options: Any
) -> tuple[OffloadEngine, Tensor]:
    """An engine, and a tensor of its cache. Block i is full of i."""
    numbers = torch.arange(BLOCKS, dtype=torch.float32)[:, None].expand(BLOCKS, 5)
    layout = PagedLayout([numbers.to(device, copy=True), (-numbers).to(device)])
    handler = OffloadHandler(layout, HostPool(layout, pages, per_page))
    return OffloadEngine(handler, **options), layout.tensors[0]


def results_of(engine: OffloadEngine) -> list[Result]:
    """Of all jobs so far."""
    drain(engine.handler)
    return engine.poll()


def load(engine: OffloadEngine, *arguments: Any) -> None:
    """A load that kernels from now on are behind."""
    job = engine.load(*arguments)
    assert job is not None
    job.wait()


def check_load_into_other_blocks(device: str) -> None:
    engine, tensor = make(device)
    with engine.handler:
        assert engine.store(["a", "b", "c"], [1, 2, 3]) is not None
        assert engine.lookup(["a", "b", "x"]) == (2, 0, 2)  # nobody has asked for results yet
        assert engine.load(["a", "b"], [8, 9]) is None
        assert [result.ok for result in results_of(engine)] == [True]
        found = engine.lookup(["a", "b", "x"])
        assert found == (2, 2, 0)
        load(engine, ["a", "b", "x"], [8, 9, 10], found.ready)
        assert tensor[8:11, 0].tolist() == [1, 2, 10]
        assert [result.direction for result in results_of(engine)] == ["load"]
        assert engine.manager.stats().idle_pages == 3


def check_keys_of_whole_pages(device: str) -> None:
    """A key stands for all blocks of a page."""
    for ids in (list, torch.tensor):
        engine, tensor = make(device, per_page=3)
        with engine.handler:
            engine.store(["a", "b"], ids([0, 1, 2, 3, 4, 5]))
            results_of(engine)
            engine.store(["a", "b", "part"], ids([0, 1, 2, 3, 4, 5, 6, 7]))
            results_of(engine)
            tensor[8:] = 0
            load(engine, ["b", "part"], ids([8, 9, 10, 11, 12]))
            assert tensor[8:, 0].tolist() == [3, 4, 5, 6, 7, 0, 0, 0]


def check_preemption(device: str) -> None:
    """A preempted request is held until it is released."""
    engine, tensor = make(device, pages=2)
    with engine.handler:
        preempted = engine.preempt(["a", "b"], [1, 2])
        assert preempted is not None
        engine.handler.synchronize(preempted.jobs)
        engine.poll()
        assert engine.store(["x"], [3]) is None
        assert engine.preempt(["x"], [3]) is None
        tensor.zero_()
        load(engine, ["a", "b"], [4, 5])
        assert engine.release(preempted)
        results_of(engine)
        assert tensor[4:6, 0].tolist() == [1, 2]
        assert engine.store(["x"], [3]) is not None


def check_groups(device: str) -> None:
    """The groups of a hybrid model load what each of them needs."""
    attention = PagedLayout([torch.arange(16.0)[:, None].repeat(1, 4).to(device)])
    state = PagedLayout([100 + torch.arange(4.0)[:, None].repeat(1, 8).to(device)])
    pools = [HostPool(attention, 8), HostPool(state, 2)]
    with OffloadHandler([attention, state], pools) as handler:
        engine = OffloadEngine(handler, [BlockGroup(8, 4), BlockGroup(2, 8, is_state=True)])
        keys = [["a", "b", "c", "d"], ["s", "t"]]
        engine.store([keys[0], keys[1][1:]], [[0, 1, 2, 3], [1]])
        results_of(engine)
        found = engine.lookup(keys)
        assert found.ready == 2
        load(engine, keys, [[12, 13, 14, 15], [2, 3]], found.ready)
        assert attention.tensors[0][12:, 0].tolist() == [0, 1, 2, 3]
        assert state.tensors[0][2:, 0].tolist() == [102, 101]


def check_evict_that_raises(device: str) -> None:
    """It loses neither jobs nor blocks."""
    for fails_at in range(3):
        engine, tensor = make(device, store_policy="lazy")
        with engine.handler as handler, pytest.MonkeyPatch.context() as patch:
            for number in range(3):
                engine.store([number, f"{number} goes on"], [2 * number, 2 * number + 1])
            submit, started = handler._submit, []

            def failing(
                *args: Any,
                submit: Any = submit,
                started: Any = started,
                at: int = fails_at,
                **of: Any,
            ) -> Any:
                if len(started) == at:
                    raise MemoryError
                started.append(submit(*args, **of))
                return started[-1]

            patch.setattr(handler, "_submit", failing)
            with pytest.raises(MemoryError):
                engine.evict([1, 3, 5])
            assert engine.manager.stats().filling_pages == 2 * fails_at
            patch.setattr(handler, "_submit", submit)
            jobs = engine.evict([1, 3, 5])
            assert len({job.id for job in [*started, *jobs]}) == 3
            drain(handler)
            assert engine.evict([1, 3, 5]) == []
            results_of(engine)
            tensor[:6] = -1
            for number in range(3):
                load(engine, [number, f"{number} goes on"], [6, 7])
                assert tensor[6:8, 0].tolist() == [2 * number, 2 * number + 1]


def check_prompts_that_left(device: str) -> None:
    """Prompts that have left the device are found on the host."""
    for storing in ("eager", "lazy"):
        for per_page in (1, 3):
            with PrefixServer(10, 100, per_page, device, store_policy=storing) as server:
                for number in range(1, 9):
                    assert server.serve(prompt(number)) == 0
                assert server.serve(prompt(1)) == 2
                server.forget_gpu()
                assert server.serve(prompt(2)) == 4
                assert server.serve(prompt(1000)) == 0


CHECKS: list[Callable[[str], None]] = [
    check_load_into_other_blocks,
    check_keys_of_whole_pages,
    check_preemption,
    check_groups,
    check_evict_that_raises,
    check_prompts_that_left,
]
