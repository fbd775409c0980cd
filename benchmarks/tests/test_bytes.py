"""Blocks and pages of the benchmarks: how they lie, and that a wrong byte anywhere is noticed."""

from __future__ import annotations

import blocks
import host_memory
import pytest
import torch
from blocks import ARRANGEMENTS, ONE_BY_ONE, ONE_TENSOR, NumberedBlocks, distances
from encoding import LOSSLESS, RAW
from host_memory import Cell
from model_blocks import ModelBlocks

pytestmark = pytest.mark.slow  # of benchmark programs

CPU = torch.device("cpu")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
def test_layers_lie_as_their_arrangement_says(device: str) -> None:
    layers = NumberedBlocks(torch.device(device), 34, 40, 2048, ONE_BY_ONE).layout.tensors
    found = distances(list(layers))
    assert len(set(found)) == len(found) == 39
    assert min(found) >= 34 * 2048
    assert len({layer.untyped_storage().data_ptr() for layer in layers}) == 40
    layers = NumberedBlocks(torch.device(device), 10, 40, 1024, ONE_TENSOR).layout.tensors
    assert set(distances(list(layers))) == {10 * 1024}


def test_layers_that_are_equally_far_apart_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    apart = list(torch.zeros(3, 10 * 1024, dtype=torch.uint8))
    monkeypatch.setattr(blocks, "_one_by_one", lambda *_: apart)
    with pytest.raises(RuntimeError, match="lie at equal distances"):
        NumberedBlocks(CPU, 10, 3, 1024, ONE_BY_ONE)


@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_a_wrong_byte_is_seen_in_every_block_and_page(arrangement: str) -> None:
    cache = NumberedBlocks(CPU, 10, 3, 1024, arrangement)
    words = torch.cat([*cache.layout.tensors, cache.host.pages.view(torch.int64).squeeze(1)], 1)
    assert len(words.unique()) == words.numel()
    assert cache.wrong() == 0
    for number in range(10):
        cache.layout.tensors[number % 3][number, 0] += 1
        cache.host.pages[number, 0, -1] ^= 1
        assert cache.wrong() == 2 * (number + 1)


def test_what_an_earlier_round_left_behind_is_wrong() -> None:
    cache, pages, ids = NumberedBlocks(CPU, 10, 2, 16), torch.tensor([3, 4]), torch.tensor([5, 6])
    cache.host.pages.view(torch.int64)[pages, 0] = torch.cat([*cache.layout.tensors], 1)[ids]
    cache.note("store", ids, pages)
    assert cache.wrong() == 0
    kept = cache.host.pages.clone()
    cache.refill()
    cache.host.pages.copy_(kept)
    assert cache.wrong() == 10


@pytest.mark.parametrize("width", [RAW, LOSSLESS])
def test_blocks_and_pages_of_a_model_that_are_wrong_are_counted(width: str) -> None:
    cache = ModelBlocks(CPU, 8, layers=3, fragment_bytes=4096, encoding=width)
    assert cache.wrong() == 0
    cache.refill()
    cache._in_pages[[0, 1]] = cache._in_pages[[1, 0]]
    cache.tensors[1][5] += 1
    assert cache.wrong() == 3


def test_host_memory_that_is_not_zero_is_wrong() -> None:
    cell = Cell("HostPool", 1 << 20)
    for make, wrong in ((torch.ones, 1), (torch.zeros, 1)):
        host_memory.take(cell, lambda size, m=make: (m(size, dtype=torch.uint8), None), True)
        assert cell.wrong == wrong
