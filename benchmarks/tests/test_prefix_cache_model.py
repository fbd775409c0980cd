"""The model that predicts a server's hits in a host cache."""

from __future__ import annotations

import random

from prefix_cache_model import PrefixCacheModel, block_keys

from torch_kvswap.prefix import BlockManager


def test_a_prompt_is_found_when_it_comes_again_and_a_shared_prefix_at_once():
    model = PrefixCacheModel(10)
    assert model.serve("abcd") == 0
    assert model.serve("abcd") == 4
    assert model.serve("abxy") == 2


def test_what_was_not_used_for_longest_goes_first_and_of_a_prompt_the_end():
    model = PrefixCacheModel(6)
    model.serve("abcd")
    model.serve("wxyz")  # takes c and d
    assert model.serve("ab") == 2
    assert model.serve("wxyz") == 4
    model.serve("kl")  # takes a and b
    assert model.serve("a") == 0


def test_a_prompt_that_does_not_fit_takes_nothing():
    model = PrefixCacheModel(3)
    model.serve("ab")
    assert model.serve("wxyz") == 0
    assert model.serve("ab") == 2


def test_the_keys_are_of_full_blocks_and_say_all_that_is_before():
    assert block_keys([1, 2, 3, 4, 5], 2) == [(1, 2), (1, 2, 3, 4)]
    assert block_keys([9, 2, 3, 4], 2) == [(9, 2), (9, 2, 3, 4)]


def test_the_block_manager_finds_what_the_model_finds():
    """Called as vLLM's connector does: a touch, a load, a store of what is new, a touch."""
    random_ = random.Random(0)
    model, manager = PrefixCacheModel(40), BlockManager(40)
    hits = 0
    for _ in range(2000):
        prefix = [random_.randrange(3)] * random_.randint(0, 6)
        end = [random_.randrange(8)] * random_.randint(1, 9)
        keys = block_keys([*prefix, *end], 1)
        found = manager.lookup(keys).ready
        manager.touch(keys)
        if found:
            load = manager.prepare_load(keys[:found])
            assert load is not None
            manager.complete(load)
        store = manager.prepare_store(keys[found:])
        if store is not None:
            manager.touch(keys)
            if store.id:
                manager.complete(store)
        manager.touch(keys)
        assert found == model.serve(keys)
        hits += found
    assert 0.2 < hits / (2000 * 8) < 0.8
