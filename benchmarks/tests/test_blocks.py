"""How the layers of a benchmark's cache lie in memory."""

from __future__ import annotations

import blocks
import pytest
import torch
from blocks import ARRANGEMENTS, ONE_BY_ONE, ONE_TENSOR, NumberedBlocks, distances

pytestmark = pytest.mark.slow  # of a benchmark program

CPU = torch.device("cpu")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def storages(cache: NumberedBlocks) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in cache.layout.tensors}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("count", "kib"), [(34, 2), (600, 8)])
def test_layers_one_by_one_have_allocations_of_their_own_and_no_common_distance(
    device: str, count: int, kib: int
) -> None:
    cache = NumberedBlocks(torch.device(device), count, 40, kib * 1024, ONE_BY_ONE)
    found = distances(list(cache.layout.tensors))
    assert len(set(found)) == len(found) == 39
    assert min(found) >= count * kib * 1024
    assert len(storages(cache)) == 40


@pytest.mark.parametrize("device", DEVICES)
def test_the_layers_of_one_tensor_are_equally_far_apart(device: str) -> None:
    cache = NumberedBlocks(torch.device(device), 10, 40, 1024, ONE_TENSOR)
    assert set(distances(list(cache.layout.tensors))) == {10 * 1024}
    assert len(storages(cache)) == 1


def test_layers_that_are_equally_far_apart_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    apart = list(torch.zeros(3, 10 * 1024, dtype=torch.uint8))
    monkeypatch.setattr(blocks, "_one_by_one", lambda *_: apart)
    with pytest.raises(RuntimeError, match="lie at equal distances"):
        NumberedBlocks(CPU, 10, 3, 1024, ONE_BY_ONE)


@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_bytes_that_change_are_seen_in_both_arrangements(arrangement: str) -> None:
    cache = NumberedBlocks(CPU, 10, 3, 1024, arrangement)
    assert cache.wrong() == 0
    cache.layout.tensors[2][7, 0] += 1
    cache.host.pages[3, 0, 0] += 1
    assert cache.wrong() == 2
