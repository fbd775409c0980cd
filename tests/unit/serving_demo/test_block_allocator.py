import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving_demo.block_allocator import BlockAllocator


@given(st.integers(0, 9), st.lists(st.tuples(st.booleans(), st.integers(0, 5))))
def test_a_block_never_has_two_owners_and_none_is_lost(count, steps):
    allocator = BlockAllocator(count)
    owned = []
    for is_take, n in steps:
        if is_take and n <= allocator.num_free:
            owned += allocator.take(n)
        elif not is_take:
            allocator.give(owned[:n])
            owned = owned[n:]
        assert len(set(owned)) == len(owned)
        assert set(owned) <= set(range(count))
        assert len(owned) + allocator.num_free == count


def test_taking_more_than_is_free_takes_nothing():
    allocator = BlockAllocator(3)
    with pytest.raises(ValueError, match="cannot take 4 blocks: 3 are free"):
        allocator.take(4)
    assert allocator.take(3) == [0, 1, 2]


@pytest.mark.parametrize("blocks", [[0, 3], [1, 0, 0], [0, -1]])
def test_giving_back_what_is_not_owned_gives_nothing_back(blocks):
    allocator = BlockAllocator(4)
    allocator.take(2)
    position = len(blocks) - 1
    with pytest.raises(ValueError, match=f"block {blocks[-1]} at position {position} is not taken"):
        allocator.give(blocks)
    assert allocator.num_free == 2
