"""Which blocks of each group of layers a prefix needs."""

from __future__ import annotations

import pytest

from torch_kvswap.prefix.groups import BlockGroup, needed_blocks, unit_tokens


@pytest.mark.parametrize(
    ("window_tokens", "block_tokens", "blocks"),
    [(None, 16, 0), (1, 16, 1), (16, 16, 1), (17, 16, 1), (18, 16, 2), (33, 16, 2), (128, 16, 8)],
)
def test_a_window_needs_the_blocks_that_its_next_token_sees(window_tokens, block_tokens, blocks):
    group = BlockGroup(1, block_tokens, window_tokens)
    assert group.window == blocks
    if window_tokens is not None and window_tokens > 1:
        end = 100 * block_tokens  # the next token, which sees itself and those before it
        seen = {token // block_tokens for token in range(end - window_tokens + 1, end)}
        assert [*needed_blocks([group], 100)[0]] == sorted(seen)


def test_a_prefix_ends_where_blocks_of_all_groups_end():
    groups = [BlockGroup(1, 6), BlockGroup(1, 4, window_tokens=9), BlockGroup(1, 12, is_state=True)]
    assert unit_tokens(groups) == 12
    assert needed_blocks(groups, 3) == [range(6), range(7, 9), range(2, 3)]
    assert needed_blocks(groups, 0) == [range(0), range(0), range(0)]
