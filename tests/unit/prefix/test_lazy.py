"""Lazy storing: blocks are stored when they leave the GPU, and a prefix cache finds them again."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
import torch
from prefix_server import HASHER, PrefixServer, prompt

from torch_kvswap import HostPool, PagedLayout, PrefixCache
from torch_kvswap.prefix import BlockGroup
from torch_kvswap.prefix.hashing import KEY_BYTES
from torch_kvswap.prefix.lazy import LazyStorePolicy


def keys_of(number, blocks=2):
    return HASHER.keys(prompt(number, blocks)).joined


def evicting(storing, blocks):
    chains = storing.chains_of(blocks)
    assert storing.chains_of(blocks) == chains  # nothing has left yet
    storing.forget(blocks)
    return chains


def test_what_leaves_is_named_with_its_prefix():
    storing = LazyStorePolicy()
    storing.record(keys_of(1), [5, 6, 7, 8])
    storing.record(keys_of(2), [5, 6, 9, 10])
    assert evicting(storing, [8]) == [(keys_of(1), [5, 6, 7, 8], ())]
    assert evicting(storing, [7, 10]) == [
        (keys_of(1)[: 3 * KEY_BYTES], [5, 6, 7], ()),
        (keys_of(2), [5, 6, 9, 10], ()),
    ]
    assert evicting(storing, [77]) == []
    storing.record(keys_of(3), [15, 16, 17, 18])
    assert evicting(storing, [18, 17, 16]) == [(keys_of(3), [15, 16, 17, 18], ())]
    assert evicting(storing, [18, 17]) == []


def test_naming_all_blocks_takes_little_more_memory():
    storing, count = LazyStorePolicy(), 1000
    storing.record(b"".join(number.to_bytes(32, "big") for number in range(count)), range(count))

    def memory(blocks):
        tracemalloc.start()
        try:
            ((_, chained, _),) = storing.chains_of(blocks)
            return tracemalloc.get_traced_memory()[1]
        finally:
            assert chained == [*range(count)]
            tracemalloc.stop()

    assert memory(range(count)) < 10 * memory([count - 1])


def test_a_reused_block_loses_its_first_prompt():
    storing = LazyStorePolicy()
    storing.record(keys_of(1), [5, 6, 7, 8])
    assert storing.record(keys_of(2), [15, 16, 7, 9]) == 7  # nobody said that 7 would go
    assert evicting(storing, [8]) == [(keys_of(1)[3 * KEY_BYTES :], [8], ())]
    storing.record(keys_of(3), [15, 16, 20, 21])
    evicting(storing, [20])
    assert evicting(storing, [21]) == [(keys_of(3)[3 * KEY_BYTES :], [21], ())]


def test_one_of_two_copies_may_leave():
    storing = LazyStorePolicy()
    storing.record(keys_of(1), [5, 6, 7, 8])
    storing.record(keys_of(1), [15, 16, 17, 18])
    assert evicting(storing, [6]) == [(keys_of(1)[: 2 * KEY_BYTES], [15, 16], ())]
    assert evicting(storing, [18]) == [(keys_of(1), [15, 16, 17, 18], ())]


def test_a_page_leaves_with_its_first_block():
    storing = LazyStorePolicy(2)
    storing.record(keys_of(1, 0), [1, 2, 3])  # the last one is part full
    assert evicting(storing, [3, 2]) == [(keys_of(1, 0), [1, 2, 3], ())]
    assert evicting(storing, [1]) == []
    storing.record(keys_of(1), [1, 2, 3, 4, 5, 6, 7, 8])
    assert evicting(storing, [4]) == [(keys_of(1)[: 2 * KEY_BYTES], [1, 2, 3, 4], ())]


def test_lazy_storing_stores_less_and_finds_as_much():
    order = np.random.default_rng(1).zipf(1.4, 100) % 30 + 1
    found, stored, jobs = {}, {}, {}
    for storing in ("eager", "lazy"):
        with PrefixServer(20, 200, store_policy=storing) as server:
            found[storing] = sum(server.serve(prompt(int(number))) for number in order)
            server.prefixes.poll()
            stored[storing], jobs[storing] = server.prefixes.manager.stats().stored, server.jobs
    assert found["lazy"] == found["eager"] > 20
    assert stored["lazy"] < stored["eager"] == 2 + 2 * len({*order})
    assert jobs["eager"] == 0 < jobs["lazy"]


def test_prompts_that_fit_are_not_stored():
    with PrefixServer(20, 200, store_policy="lazy") as server:
        for _ in range(10):
            server.serve(prompt(1))
            server.serve(prompt(2))
        assert server.prefixes.manager.stats().stored == 0


def test_what_leaves_a_full_host_is_left_out():
    with PrefixServer(8, 5, store_policy="lazy") as server:
        server.serve(prompt(1, blocks=6))
        assert server.take(8) is not None  # all of its 8 pages leave, there is room for 5
        assert server.prefixes.manager.stats().stored == 0
        assert server.prefixes.manager.stats().refused == 1


def test_a_block_that_left_loses_its_key():
    tensor = torch.arange(4.0)[:, None].repeat(1, 4)
    layout = PagedLayout([tensor])
    with PrefixCache(layout, HostPool(layout, 4), store_policy="lazy") as prefixes:
        prefixes.store(["a"], [1])
        assert len(prefixes.evict([1])) == 1
        prefixes.poll()
        prefixes.manager.reset()
        tensor[1] = 9  # the contents of a block that no key was recorded for
        assert prefixes.evict([1]) == []
        assert prefixes.lookup(["a"]).found == 0


def test_an_overwritten_block_loses_its_key():
    tensor = torch.arange(4.0)[:, None].repeat(1, 4)
    layout = PagedLayout([tensor])
    with PrefixCache(layout, HostPool(layout, 4), store_policy="lazy") as prefixes:
        prefixes.store(["a"], [1])
        prefixes.evict([1])
        prefixes.poll()
        prefixes.store(["b"], [2])
        prefixes.load(["a"], [2])  # without evict([2])
        assert prefixes.evict([2]) == []
        assert prefixes.lookup(["b"]).found == 0


def lazy_cache(value):
    """A lazy prefix cache whose GPU blocks all have this value, with block 1 recorded as "a"."""
    layout = PagedLayout([torch.full((4, 16), value, dtype=torch.uint8)])
    prefixes = PrefixCache(layout, HostPool(layout, 4), store_policy="lazy")
    prefixes.store(["a"], [1])
    return prefixes


def loaded_byte(prefixes):
    """What is loaded for "a" once block 1 has left; None if nothing is found."""
    prefixes.evict([1])
    prefixes.poll()
    job = prefixes.load(["a"], [2])
    if job is None:
        return None
    prefixes.poll()
    return prefixes.layouts[0].tensors[0][2].unique().item()


def test_a_reset_forgets_what_was_to_be_stored():
    with lazy_cache(7) as prefixes:
        prefixes.manager.reset()
        assert loaded_byte(prefixes) is None
        prefixes.layouts[0].tensors[0].fill_(9)  # computed with new weights
        prefixes.store(["a"], [1])
        assert loaded_byte(prefixes) == 9


def test_a_reset_during_evict_forgets_too(monkeypatch):
    reset_after, records = [], PrefixCache._records

    def reset_in_between(prefixes):
        recorded = records(prefixes)
        if reset_after:  # as another thread would
            prefixes.manager.reset()
        return recorded

    monkeypatch.setattr(PrefixCache, "_records", reset_in_between)
    for is_control in (True, False):
        with lazy_cache(7) as prefixes:
            if not is_control:
                reset_after.append(True)
            assert loaded_byte(prefixes) == (7 if is_control else None)


def test_rebind_forgets_what_was_to_be_stored():
    with lazy_cache(7) as prefixes:
        prefixes.rebind(PagedLayout([torch.zeros(4, 16, dtype=torch.uint8)]))
        assert loaded_byte(prefixes) is None
    with lazy_cache(7) as prefixes:
        with pytest.raises(TypeError):
            prefixes.rebind(None)
        assert loaded_byte(prefixes) == 7


def test_a_closed_lazy_cache_stores_nothing():
    prefixes = lazy_cache(7)
    prefixes.close()
    assert prefixes.evict([1]) == []
    with pytest.raises(RuntimeError, match="closed"):
        prefixes.store(["a"], [1])


def test_each_group_of_layers_stores_what_leaves_it():
    tensors = [torch.arange(8.0)[:, None].repeat(1, width) for width in (4, 8)]
    layouts = [PagedLayout([tensor]) for tensor in tensors]
    with PrefixCache(
        layouts,
        [HostPool(layout, 4) for layout in layouts],
        [BlockGroup(4), BlockGroup(4)],
        store_policy="lazy",
    ) as prefixes:
        assert prefixes.store([["a", "b"], ["a", "b"]], [[1, 2], [3, 4]]) == ("recorded", None)
        (job,) = prefixes.evict([[2], []])
        assert job.nbytes == 2 * 16
        prefixes.poll()
        assert prefixes.lookup([["a", "b"], ["a", "b"]]).ready == 0
        prefixes.evict([[], [4]])
        prefixes.poll()
        assert prefixes.lookup([["a", "b"], ["a", "b"]]).ready == 2
        prefixes.load([["a", "b"], ["a", "b"]], [[5, 6], [5, 6]])
        assert tensors[0][5:7, 0].tolist() == [1, 2]
        assert tensors[1][5:7, 0].tolist() == [3, 4]
