"""vLLM's caches as layouts, and its transfers as lists of ids. Whether their bytes are right is tested
with the worker."""

from __future__ import annotations

import re
from types import SimpleNamespace as Record
from typing import Any

import numpy as np
import pytest
from vllm_contract import caches

from torch_kvswap.integrations.vllm.kv_layouts import Move, group_layouts, read_move


def gpu(blocks: list[int], sizes: list[int], indices: list[int]) -> Any:
    return Record(block_ids=np.array(blocks, np.int32), group_sizes=sizes, block_indices=indices)


def host(*pages: int) -> Any:
    return Record(block_ids=np.array(pages, np.int64))


def lists(move: Move) -> tuple[list[list[int]], list[list[int]], list[int]]:
    return (
        [blocks.tolist() for blocks in move.blocks],
        [pages.tolist() for pages in move.pages],
        move.first_slots,
    )


def test_layers_sharing_a_tensor_are_one_slab():
    (layout,) = group_layouts(caches([[(0, 16), (0, 48), (0, 32)]], [64], "cpu"))
    assert layout.sizes.tolist() == [48]


@pytest.mark.parametrize(
    ("refs", "names"),
    [
        ([0, 1], ["a", "b"]),
        ([1, 0], ["a", "b"]),
        ([0], ["a to b, tensor 0"]),
        ([0, 1, 2, 3], [f"a to b, tensor {tensor}" for tensor in range(4)]),
        ([0, 0], ["b"]),
    ],
)
def test_tensors_are_named_after_their_layers(refs, names):
    cache = caches([[(tensor, 16) for tensor in refs]], [16] * 4, "cpu")
    (layout,) = group_layouts(cache, layers=[["a", "b"]])
    assert layout.names == tuple(names)


def test_places_are_in_the_order_of_blocks():
    move = read_move(gpu([1, 2, 3, 4, 5], [2, 0, 3], [2, 0, 4]), host(7, 6, 8, 9), [True] * 3, 3)
    assert move.places(3) == [(1, 7), (2, 6), (3, 8), (4, 8), (5, 9)]


@pytest.mark.parametrize(
    ("blocks", "pages"), [([1, 2, 3], [7]), ([1, 2], [7, 8, 9]), ([1, 2, 3, 4], [7, 8])]
)
def test_pages_that_do_not_fit_are_refused(blocks, pages):
    move = gpu(blocks, [3], [0])
    said = "but its groups of [3] blocks starting at [0] need 3 and 2"
    with pytest.raises(ValueError, match=re.escape(said)):
        read_move(move, host(*pages), [True], 2)
