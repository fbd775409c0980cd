"""Eviction policies: ARC against a plain implementation of the published algorithm, and what both
policies have in common. A model has LRU (test_manager_states.py)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_kvswap.prefix.block_groups import BlockGroup
from torch_kvswap.prefix.manager import BlockManager

CAPACITY = 40


class PlainArc:
    """ARC(c) of Megiddo and Modha, FAST 2003, figure 4, with its four cases by name."""

    def __init__(self, c: int) -> None:
        self.c, self.p = c, 0.0
        self.t1, self.t2, self.b1, self.b2 = (OrderedDict[int, None]() for _ in range(4))

    def replace(self, in_b2: bool) -> None:
        t1 = len(self.t1)
        if t1 >= 1 and ((in_b2 and t1 == self.p) or t1 > self.p):
            self.b1[self.t1.popitem(last=False)[0]] = None
        else:
            self.b2[self.t2.popitem(last=False)[0]] = None

    def request(self, x: int) -> bool:
        if x in self.t1 or x in self.t2:  # case I
            self.t1.pop(x, None)
            self.t2.pop(x, None)
            self.t2[x] = None
            return True
        if x in self.b1:  # case II
            self.p = min(self.c, self.p + max(len(self.b2) / len(self.b1), 1))
            self.replace(False)
            del self.b1[x]
            self.t2[x] = None
        elif x in self.b2:  # case III
            self.p = max(0, self.p - max(len(self.b1) / len(self.b2), 1))
            self.replace(True)
            del self.b2[x]
            self.t2[x] = None
        else:  # case IV
            l1, l2 = len(self.t1) + len(self.b1), len(self.t2) + len(self.b2)
            if l1 >= self.c:
                if self.b1:
                    self.b1.popitem(last=False)
                    self.replace(False)
                else:
                    self.t1.popitem(last=False)
            elif l1 + l2 >= self.c:
                if l1 + l2 == 2 * self.c:
                    self.b2.popitem(last=False)
                self.replace(False)
            self.t1[x] = None
        return False


def hits(policy: str, trace: Sequence[int], manager: BlockManager | None = None) -> list[bool]:
    """Which requests of the trace find their block; those that do not store it."""
    manager = manager or BlockManager(CAPACITY, eviction_policy=policy)
    found = []
    for x in trace:
        found.append(manager.lookup([x]).ready == 1)
        if found[-1]:
            manager.touch([x])
        else:
            manager.complete(manager.prepare_store([x]))
    return found


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 6), st.lists(st.integers(0, 12), min_size=30, max_size=200))
def test_arc_is_its_plain_algorithm_on_small_traces(capacity, trace):
    reference, manager = PlainArc(capacity), BlockManager(capacity, eviction_policy="arc")
    assert hits("arc", trace, manager) == [reference.request(x) for x in trace]
    cached = {x for x in range(13) if manager.lookup([x]).ready}
    assert cached == {*reference.t1, *reference.t2}
    manager.reset()  # which forgets all of it
    again = PlainArc(capacity)
    assert hits("arc", trace, manager) == [again.request(x) for x in trace]


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 4), st.lists(st.integers(0, 12), min_size=30, max_size=200))
def test_arc_counts_only_the_pages_ready(ready, trace):
    manager = BlockManager(7, num_ready_pages=ready, eviction_policy="arc")
    reference = PlainArc(ready)
    assert hits("arc", trace, manager) == [reference.request(x) for x in trace]
    manager.grow()
    hits("arc", [*range(100, 107), *range(100, 107)], manager)
    assert manager.lookup(list(range(100, 107))).ready == 7


@pytest.mark.parametrize("policy", ["lru", "arc"])
@pytest.mark.parametrize("is_use", [False, True])
def test_holding_pages_without_use_changes_no_order(policy, is_use):
    manager = BlockManager(3, eviction_policy=policy)
    for key in "abc":
        manager.complete(manager.prepare_store([key]))
    load = manager.prepare_load(["a"]) if is_use else manager._hold(["a"])
    manager.complete(manager.prepare_store(["d"]))
    assert [manager.lookup([key]).ready for key in "abcd"] == [1, 0, 1, 1]
    manager.complete(load)
    manager.complete(manager.prepare_store(["e"]))
    gone = "c" if is_use else "a"
    assert [key for key in "acde" if not manager.lookup([key]).ready] == [gone]


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_a_prompt_extended_under_a_hold_is_newest(policy):
    manager = BlockManager(6, eviction_policy=policy)
    for keys in ("ab", "cd"):
        manager.complete(manager.prepare_store([*keys]))
    held = manager._hold(["a", "b"])
    manager.complete(manager.prepare_store(["a", "b", "e"]))
    manager.complete(held)
    manager.complete(manager.prepare_store(["f", "g", "h"]))
    assert [key for key in "abcde" if not manager.lookup([key]).ready] == ["c", "d"]


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_a_prompt_extended_while_loaded_keeps_its_place(policy):
    manager, folded = BlockManager(6, eviction_policy=policy), {}
    for keys in ("ab", "cd"):
        folded[keys] = [key.encode() for key in keys]
        manager.complete(manager.prepare_store(folded[keys]))
    loads = []
    for keys in ("ab", "cd"):
        loads.append(manager.prepare_load(folded[keys]))
        manager.order(folded[keys], renew=True)
    store = manager.prepare_store([b"a", b"b", b"e"])
    manager.order([b"a", b"b", b"e"])
    for one in (*loads, store):
        manager.complete(one)
    manager.complete(manager.prepare_store([b"f", b"g"]))
    assert [key for key in "abcde" if not manager.lookup([key.encode()]).ready] == ["e"]


def test_a_prompt_extended_while_ordered_is_evicted_from_its_end():
    """docs/own_engine.md orders a prompt while its load runs, and stores all of its blocks."""
    manager = BlockManager(5)
    manager.complete(manager.prepare_store([*"abc"]))
    load = manager.prepare_load([*"bc"])
    manager.touch(["a"])
    manager.order([*"abc"], renew=True)
    manager.complete(manager.prepare_store(["x"]))
    store = manager.prepare_store([*"abcd"])
    manager.complete(load)
    manager.complete(store)
    for number, left in enumerate(["abcdx", "abcd", "abc", "ab", "a"]):
        assert [key for key in "abcdx" if manager.lookup([key]).ready] == sorted(left)
        manager.complete(manager.prepare_store([number]))


@pytest.mark.parametrize("policy", ["lru", "arc"])
@pytest.mark.parametrize("how", ["is released", "is placed before a held one"])
def test_what_evictions_have_skipped_can_be_evicted(policy, how):
    manager = BlockManager(5, eviction_policy=policy)
    for key in "abcde":
        manager.complete(manager.prepare_store([key]))
    held = manager._hold(["a"]), manager._hold(["b"])
    manager.complete(manager.prepare_store(["f"]))  # skips a and b, evicts c
    if how == "is released":
        manager.complete(held[1])
    else:
        manager.order(["b", "e"])
    manager.complete(manager.prepare_store(["g"]))
    gone = "b" if how == "is released" else "e"
    assert [key for key in "abdefg" if not manager.lookup([key]).ready] == [gone]


def test_arc_knows_nothing_of_stores_that_failed():
    manager = BlockManager(CAPACITY, eviction_policy="arc")
    for key in range(1000, 1000 + 2 * CAPACITY):
        manager.fail(manager.prepare_store([key]))
    trace = np.random.default_rng(4).integers(0, 2 * CAPACITY, 6000).tolist()
    assert hits("arc", trace, manager) == hits("arc", trace)


def test_arc_remembers_evictions_beside_held_pages():
    manager = BlockManager(2, eviction_policy="arc")
    for key in ("a", "b", "c", "d"):  # all of them used again: "a" and "b" are remembered
        fill(manager, [key])
        manager.complete(manager.prepare_load([key]))
    first, second = manager.prepare_load(["c"]), manager.prepare_load(["c"])
    manager.fail(first)
    fill(manager, ["e"])  # takes the place of "d", a third one to remember
    manager.fail(second)
    fill(manager, ["f"])
    assert manager.lookup(["e", "f"]).ready == 2


def fill(manager: BlockManager, keys: Sequence[int | str]) -> None:
    store = manager.prepare_store(keys)
    assert store is not None
    manager.complete(store)


def evicted_by(manager: BlockManager, count: int) -> list[int]:
    """Who goes for new blocks, in order."""
    gone: list[int] = []
    for new in range(1000, 1000 + count):
        known = [key for key in range(100) if manager.lookup([key], again=True).found]
        fill(manager, [new])
        gone += [key for key in known if not manager.lookup([key], again=True).found]
    return gone


@pytest.mark.parametrize("policy", ["lru", "arc"])
@pytest.mark.parametrize("names", ["all keys so far", "new keys, then their order"])
def test_a_prompt_is_evicted_from_its_end(policy, names):
    manager = BlockManager(6, eviction_policy=policy)
    prompt = list(range(6))
    for first in (0, 2, 4):
        last = first + 2
        fill(manager, prompt[:last] if names == "all keys so far" else prompt[first:last])
        if names != "all keys so far":
            manager.order(prompt[max(first - 1, 0) : last])
    assert evicted_by(manager, 6) == prompt[::-1]


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_renewed_blocks_are_newest_but_not_reused(policy):
    manager = BlockManager(6, eviction_policy=policy)
    prompt, other = [0, 1, 2], [10, 11, 12]
    fill(manager, prompt)
    fill(manager, other)
    manager.order(prompt, renew=True)
    assert evicted_by(manager, 6) == other[::-1] + prompt[::-1]


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_held_blocks_are_skipped_and_keep_their_place(policy):
    manager = BlockManager(4, eviction_policy=policy)
    store = manager.prepare_store([0, 1])
    assert store is not None
    manager.order([0, 1])
    fill(manager, [2, 3])
    manager.order([2, 3], renew=True)
    assert manager.prepare_store([10, 11, 12]) is None
    fill(manager, [10])
    assert manager.lookup([3], again=True).found == 0
    manager.complete(store)
    assert evicted_by(manager, 4) == [1, 0, 2, 10]


def test_blocks_that_are_not_there_have_no_order():
    manager = BlockManager(4)
    prompt = list(range(4))
    fill(manager, prompt)
    load = manager.prepare_load(prompt[1:2])
    assert load is not None
    manager.order([prompt[3], prompt[1], 99, prompt[0], prompt[3]], renew=True)
    manager.order([prompt[3], prompt[1], 99, prompt[0]])
    manager.complete(load)
    assert evicted_by(manager, 4) == [prompt[2], prompt[0], prompt[1], prompt[3]]


def test_a_key_named_twice_is_ordered_once():
    manager = BlockManager(3)
    fill(manager, ["a", "b", "c"])
    manager.order(["b", "b"])
    pages = [manager.prepare_store([key]).pages.tolist() for key in "xyz"]
    assert pages == [[2], [1], [0]]  # each page once, the end of the prompt first


@pytest.mark.parametrize("renew", [False, True])
def test_no_keys_have_no_order(renew):
    """UBSan reads along: nothing was found yet, so that there is no list to point into."""
    manager = BlockManager(CAPACITY)
    manager.order(b"", renew=renew)
    assert manager.stats().free_pages == CAPACITY


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_a_store_names_evicted_pages_in_order(policy):
    manager = BlockManager([BlockGroup(3, 16), BlockGroup(2, 16)], eviction_policy=policy)
    pages = {}
    for at in range(2):
        first = manager.prepare_store([[at], [at]])
        assert first.evicted == []
        pages[at] = [int(of_group[0]) for of_group in first.pages]
        manager.complete(first)
    manager.touch([[0], [0]])  # so that 1 goes first
    second = manager.prepare_store([[7, 8, 9], [7, 8]])
    assert second.evicted == [pages[1][0], pages[0][0], pages[1][1], pages[0][1]]
