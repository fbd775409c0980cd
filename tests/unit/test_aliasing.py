"""Layouts that share memory must share whole blocks."""

from __future__ import annotations

from collections import Counter
from itertools import combinations
from random import Random

import torch
from error_text import error_text
from expecttest import assert_expected_inline

from torch_kvswap.layout import PagedLayout, block_spaces


def test_layouts_share_blocks_as_their_bytes_say() -> None:
    """Against every byte, for random rows of one storage. Rows at other distances than those of
    another layout may be refused without need."""
    random, outcomes = Random(0), Counter[str]()
    for _ in range(1000):
        memory, stride = torch.zeros(40, dtype=torch.uint8), random.randint(4, 10)
        is_even = random.random() < 0.9
        layouts, block_of = [], []
        for _ in range(3):
            own = stride if is_even else random.randint(4, 10)
            blocks, size, first = random.randint(1, 3), random.randint(1, 4), random.randrange(10)
            layouts.append(PagedLayout([memory.as_strided((blocks, size), (own, 1), first)]))
            block_of.append(
                {first + block * own + at: block for block in range(blocks) for at in range(size)}
            )
        shared = {
            (one, other): {
                (block_of[one][byte], block_of[other][byte])
                for byte in block_of[one].keys() & block_of[other].keys()
            }
            for one, other in combinations(range(3), 2)
        }
        is_allowed = all(one == other for pairs in shared.values() for one, other in pairs)
        try:
            spaces = block_spaces(layouts)
        except ValueError:
            assert not (is_allowed and is_even)
            outcomes["refused"] += 1
            continue
        assert is_allowed
        expected = list(range(3))
        for one, other in (pair for pair, blocks in shared.items() if blocks):
            expected = [expected[one] if at == expected[other] else at for at in expected]
        equal = [[space == other for other in spaces] for space in spaces]
        assert equal == [[space == other for other in expected] for space in expected]
        outcomes[f"{len(set(spaces))} spaces"] += 1
    assert len(outcomes) == 4
    assert min(outcomes.values()) > 40, outcomes


def test_layouts_of_several_tensors_join_others() -> None:
    one, other = torch.zeros(4, 6), torch.zeros(4, 6)
    layouts = [PagedLayout([one]), PagedLayout([other]), PagedLayout([one, other])]
    assert len({*block_spaces(layouts[:2])}) == 2
    assert len({*block_spaces(layouts)}) == len({*block_spaces(layouts[::-1])}) == 1


def test_blocks_of_another_number_may_not_be_shared() -> None:
    rows = torch.zeros(5, 12)
    assert_expected_inline(
        error_text(block_spaces, [PagedLayout([rows[:4]]), PagedLayout([rows[1:]])]),
        """\
ValueError: layouts 0 and 1 share memory, but the same id is not the same block in both;
make them from the same blocks with the same stride""",
    )
