"""What a prefix cache stores and loads, byte by byte, on any device. CHECKS has all of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from drained import drain
from torch import Tensor

from torch_kvswap import HostPool, PagedLayout, PrefixCache, Result
from torch_kvswap.prefix import BlockGroup

BLOCKS, PAGES = 16, 6


def make(
    device: str = "cpu", per_page: int = 1, pages: int = PAGES, **options: Any
) -> tuple[PrefixCache, Tensor]:
    """A prefix cache, and a tensor of its cache. Block i is full of i."""
    numbers = torch.arange(BLOCKS, dtype=torch.float32)[:, None].expand(BLOCKS, 5)
    layout = PagedLayout([numbers.to(device, copy=True), (-numbers).to(device)])
    return PrefixCache(layout, HostPool(layout, pages, per_page), **options), layout.tensors[0]


def results_of(prefixes: PrefixCache) -> list[Result]:
    """Of all jobs so far."""
    drain(prefixes)
    return prefixes.poll()


def load(prefixes: PrefixCache, *arguments: Any) -> None:
    """A load that kernels from now on are behind."""
    job = prefixes.load(*arguments)
    assert job is not None
    job.wait()


def check_groups(device: str) -> None:
    """The groups of a hybrid model load what each of them needs."""
    attention = PagedLayout([torch.arange(16.0)[:, None].repeat(1, 4).to(device)])
    state = PagedLayout([100 + torch.arange(4.0)[:, None].repeat(1, 8).to(device)])
    pools = [HostPool(attention, 8), HostPool(state, 2)]
    with PrefixCache(
        [attention, state], pools, [BlockGroup(8, 4), BlockGroup(2, 8, is_state=True)]
    ) as prefixes:
        keys = [["a", "b", "c", "d"], ["s", "t"]]
        prefixes.store([keys[0], keys[1][1:]], [[0, 1, 2, 3], [1]])
        results_of(prefixes)
        found = prefixes.lookup(keys)
        assert found.ready == 2
        load(prefixes, keys, [[12, 13, 14, 15], [2, 3]], found.ready)
        assert attention.tensors[0][12:, 0].tolist() == [0, 1, 2, 3]
        assert state.tensors[0][2:, 0].tolist() == [102, 101]


def check_evict_that_raises(device: str) -> None:
    """It loses neither jobs nor blocks."""
    for fails_at in range(3):
        prefixes, tensor = make(device, store_policy="lazy")
        with prefixes, pytest.MonkeyPatch.context() as patch:
            for number in range(3):
                prefixes.store([f"{number}", f"{number} goes on"], [2 * number, 2 * number + 1])
            handler = prefixes._handler
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
                prefixes.evict([1, 3, 5])
            assert prefixes.manager.stats().filling_pages == 2 * fails_at
            patch.setattr(handler, "_submit", submit)
            jobs = prefixes.evict([1, 3, 5])
            assert len({job.id for job in [*started, *jobs]}) == 3
            drain(prefixes)
            assert prefixes.evict([1, 3, 5]) == []
            results_of(prefixes)
            tensor[:6] = -1
            for number in range(3):
                load(prefixes, [f"{number}", f"{number} goes on"], [6, 7])
                assert tensor[6:8, 0].tolist() == [2 * number, 2 * number + 1]


CHECKS: list[Callable[[str], None]] = [check_groups, check_evict_that_raises]
