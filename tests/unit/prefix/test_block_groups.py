"""Which blocks of each group of layers a prefix needs."""

from __future__ import annotations

import numpy as np
import pytest
from error_text import error_text
from expecttest import assert_expected_inline

from torch_kvswap.prefix.block_groups import BlockGroup, unit_tokens
from torch_kvswap.prefix.manager import BlockManager


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
        assert [*BlockManager([group]).needed_blocks(100)[0]] == sorted(seen)


def test_a_prefix_ends_where_blocks_of_all_groups_end():
    groups = [BlockGroup(1, 6), BlockGroup(1, 4, window_tokens=9), BlockGroup(1, 12, is_state=True)]
    assert unit_tokens(groups) == 12
    manager = BlockManager(groups)
    assert manager.needed_blocks(3) == [range(6), range(7, 9), range(2, 3)]
    assert manager.needed_blocks(0) == [range(0), range(0), range(0)]


def test_the_fields_of_a_group_are_checked_when_it_is_made():
    errors = [
        error_text(BlockGroup, 0),
        error_text(BlockGroup, 4, 1.5),
        error_text(BlockGroup, 4, 2**64),
        error_text(BlockGroup, 4, window_tokens=0),
        error_text(BlockGroup, 4, is_state="no"),
        error_text(BlockGroup, 4, window_tokens=4, is_state=True),
    ]
    assert_expected_inline(
        "\n".join(errors),
        """\
ValueError: num_pages is 0; it must be 1 to 536870912
TypeError: block_tokens is a float; it must be an integer
ValueError: block_tokens is 18446744073709551616; it must be 1 to 2147483647
ValueError: window_tokens is 0; it must be 1 or more
TypeError: is_state is a str; it must be True or False
ValueError: window_tokens is 4 and is_state is True; layers have a window or a state:
pass one of them""",
    )
    group = BlockGroup(np.int32(4), np.int64(2), window_tokens=np.uint8(8))
    assert [type(number) for number in (group.num_pages, group.block_tokens)] == [int, int]
    assert group == BlockGroup(4, 2, 8)
