"""The block manager's calls and errors."""

from __future__ import annotations

import itertools
import os
import re
import threading
import time
from array import array
from random import Random

import numpy as np
import pytest
from error_text import error_text
from expecttest import assert_expected_inline
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import run_script

from torch_kvswap.prefix.block_groups import BlockGroup, unit_tokens
from torch_kvswap.prefix.hashing import KEY_BYTES, PrefixKeys, hash_key
from torch_kvswap.prefix.manager import BlockManager, BlockStats, Lookup


def stored(manager, keys):
    store = manager.prepare_store(keys)
    manager.complete(store)
    return dict(
        zip((keys[place] for place in store.key_indices), store.pages.tolist(), strict=True)
    )


def test_a_prompt_is_bytes_or_key_list():
    manager = BlockManager(8)
    hashed = [os.urandom(32) for _ in range(3)]
    store = manager.prepare_store(b"".join(hashed))
    assert store.key_indices.tolist() == [0, 1, 2]
    manager.complete(store)
    for prompt in (hashed, tuple(hashed), PrefixKeys(b"".join(hashed), 1)):
        assert manager.lookup(prompt).ready == 3
    keys = [("tenant", 1, b"x"), "text", 7]
    manager.complete(manager.prepare_store(keys))
    assert manager.lookup(list(map(hash_key, keys))).ready == 3
    assert manager.lookup([hashed[0].hex()[:32], "x" * 32]).found == 0  # as long as a key


def test_only_new_blocks_are_stored_on_neighbouring_pages():
    manager = BlockManager(100)
    stored(manager, list(range(10)))
    store = manager.prepare_store(list(range(20)))
    assert store.key_indices.tolist() == list(range(10, 20))
    assert store.pages.tolist() == list(range(10, 20))
    manager.complete(store)
    nothing = manager.prepare_store(list(range(20)))
    assert (nothing.id, nothing.key_indices.size, nothing.pages.size) == (0, 0, 0)
    manager.complete(nothing)


def test_pages_of_an_evicted_prompt_are_neighbours_again():
    manager = BlockManager(64)
    for prompt in range(4):
        stored(manager, list(range(100 * prompt, 100 * prompt + 16)))
    store = manager.prepare_store(list(range(1000, 1016)))
    assert store.pages.tolist() == list(range(16))


def test_each_group_has_its_own_ready_pages():
    manager = BlockManager([BlockGroup(4), BlockGroup(4)], num_ready_pages=[0, 2])
    assert manager.prepare_store([["a"], ["a"]]) is None
    manager.complete(manager.prepare_store([[], ["a", "b"]]))
    manager.grow([1, 2])
    manager.complete(manager.prepare_store([["a"], ["a"]]))
    assert manager.lookup([["a"], ["a"]]).ready == 1
    assert [manager.stats(group).pages for group in range(2)] == [1, 2]


def test_blocks_are_stored_once_asked_often_enough():
    manager = BlockManager(8, store_threshold=2)
    manager.lookup(["a", "b"])
    assert manager.prepare_store(["a", "b"]).key_indices.tolist() == []
    manager.lookup(["a", "b"], again=True)  # the same question is no further demand
    assert manager.prepare_store(["a", "b"]).key_indices.tolist() == []
    manager.lookup(["a", "c"])
    assert manager.prepare_store(["a", "b", "c"]).key_indices.tolist() == [0]
    assert manager.stats().skipped == 2 + 2 + 2


def test_old_demand_is_not_counted_for_ever():
    manager = BlockManager(4, store_threshold=2)
    manager.lookup(["a"])
    manager.lookup([1, 2, 3])
    manager.lookup(["a"])
    assert manager.prepare_store(["a"]).key_indices.tolist() == [0]
    manager.lookup(["b"])
    manager.lookup([4, 5, 6, 7])
    manager.lookup(["b"])
    assert manager.prepare_store(["b"]).key_indices.tolist() == []


def test_the_end_of_a_prompt_is_forgotten_first():
    manager = BlockManager(4, store_threshold=2)  # remembers as many keys as it has pages
    for keys in ("abcd", "e", "f"):
        manager.lookup(list(keys))
    manager.lookup(["b"])
    assert manager.prepare_store(["b"]).key_indices.tolist() == [0]
    manager.lookup(["d"])  # which was forgotten
    assert manager.prepare_store(["d"]).key_indices.tolist() == []


def test_a_threshold_stores_no_block_without_its_prefix():
    manager = BlockManager(4, store_threshold=2)
    manager.lookup(["a", "b", "c"])
    manager.lookup(["a", "b", "c"])
    manager.lookup(["x", "y"])  # now one of the first three keys must be forgotten
    manager.complete(manager.prepare_store(["a", "b", "c"]))
    assert manager.lookup(["a", "b", "c"]).ready == manager.stats().stored == 2


def test_statistics_count_blocks():
    manager = BlockManager(4)
    manager.lookup(["a", "b"])
    stored(manager, ["a", "b"])
    running = manager.prepare_store(["c"])
    manager.lookup(["a", "b", "c", "d"])
    manager.complete(manager.prepare_load(["a", "b"]))
    manager.fail(running)
    stored(manager, list("vwxyz")[:3])
    assert manager.prepare_store(list("12345")) is None
    stats = manager.stats()
    assert stats == BlockStats(
        asked=6, hits=2, pending=1, stored=5, loaded=2, evicted=1, skipped=0, refused=1, failed=1,
        pages=4, free_pages=0, idle_pages=4, filling_pages=0, promoted=0, lost=0,
    )  # fmt: skip


def hybrid(pages=20):
    """Blocks of 4 tokens of all layers, of 2 tokens with a window of 5, and states of 8 tokens."""
    return BlockManager(
        [
            BlockGroup(pages, 4),
            BlockGroup(pages, 2, window_tokens=5),
            BlockGroup(pages, 8, is_state=True),
        ]
    )


def keys_of(tokens):
    return [[(g, i) for i in range(tokens // size)] for g, size in enumerate((4, 2, 8))]


def test_a_prefix_ends_where_all_groups_are_ready():
    manager = hybrid()
    full, window, state = keys_of(32)
    manager.complete(manager.prepare_store([full, window[2:4] + window[14:], [state[0], state[2]]]))
    assert manager.lookup([full, window, state]).found == 1
    running = manager.prepare_store([[], window[10:12], []])
    assert manager.lookup([full, window, state]) == Lookup(3, 1, 2)
    manager.complete(running)
    assert manager.lookup([full, window, state]) == Lookup(3, 3, 0)
    assert [manager.stats(group).hits for group in range(3)] == [2 + 2 + 6, 2 + 2 + 2, 1 + 1 + 1]


def test_a_lookup_checks_blocks_once_for_missing_states():
    count = 20_000
    keys = b"".join(number.to_bytes(32, "big") for number in range(count))
    full, window = BlockGroup(count), BlockGroup(count, window_tokens=count // 4)
    state = BlockGroup(count, is_state=True)
    manager = BlockManager([full, window, state])
    manager.complete(manager.prepare_store([keys, keys, [keys[:32]]]))

    def seconds(of_state):
        took = []
        for _ in range(3):
            before = time.thread_time()
            assert manager.lookup([keys, keys, of_state]).ready == 1
            took.append(time.thread_time() - before)
        return min(took)

    assert seconds(keys) < 30 * seconds(keys[:32])  # with all states, and with one


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_the_longest_prefix_equals_a_plain_search(data):
    kinds = st.sampled_from([{}, {"window_tokens": 3}, {"window_tokens": 9}, {"is_state": True}])
    groups = [
        BlockGroup(40, data.draw(st.sampled_from([1, 2, 4])), **data.draw(kinds))
        for _ in range(data.draw(st.integers(1, 3)))
    ]
    manager = BlockManager(groups)
    keys = [[*range(24 // group.block_tokens)] for group in groups]
    likely = data.draw(st.sampled_from([0.5, 0.9, 0.97]))
    random = Random(data.draw(st.integers(0, 1 << 32)))
    states = [[(random.random() < likely, random.random() < likely) for _ in of] for of in keys]

    def of_state(wanted):
        return [
            [key for key, (there, ready) in zip(of, its, strict=True) if there and ready == wanted]
            for of, its in zip(keys, states, strict=True)
        ]

    def longest(usable):
        return max(
            units
            for units in range(24 // manager.unit_tokens + 1)
            if all(
                usable(*its[block])
                for its, blocks in zip(states, manager.needed_blocks(units), strict=True)
                for block in blocks
            )
        )

    manager.complete(manager.prepare_store(of_state(True)))
    running = manager.prepare_store(of_state(False))
    found = manager.lookup(keys)
    assert found.found == longest(lambda there, ready: there)
    assert found.ready == longest(lambda there, ready: there and ready)
    usable = [
        # No load can use what is behind a missing block.
        its if group.window else itertools.takewhile(lambda state: state[0], its)
        for group, its in zip(groups, states, strict=True)
    ]
    assert found.pending == sum(there and not ready for its in usable for there, ready in its)
    # What a second tier has behind a prefix in memory of this length.
    first = data.draw(st.integers(0, 24 // manager.unit_tokens))
    there = []
    for group, its in zip(groups, states, strict=True):
        known = first * manager.unit_tokens // group.block_tokens
        there.append(bytes(state[0] for state in its[known:]))
        its[:known] = [(True, state[1]) for state in its[:known]]
    assert manager._longest_prefix(first, there) == longest(lambda there, ready: there)
    manager.complete(running)


def test_a_refused_store_evicts_in_no_group():
    manager = BlockManager([BlockGroup(2), BlockGroup(1)])
    manager.complete(manager.prepare_store([["a", "b"], []]))
    running = manager.prepare_store([[], ["x"]])
    assert manager.prepare_store([["c", "d"], ["y"]]) is None
    assert (manager.stats().evicted, manager.stats().idle_pages) == (0, 2)
    manager.complete(running)
    store = manager.prepare_store([["c", "d"], ["y"]])
    assert [pages.tolist() for pages in store.pages] == [[0, 1], [0]]


def test_hold_takes_what_is_ready_without_use():
    manager = BlockManager([BlockGroup(2), BlockGroup(2)])
    store = manager.prepare_store([["a", "b"], ["c"]])
    manager.complete(store)
    held = manager._hold([["x", "b"], ["y", "z", "c"]])
    assert [places.tolist() for places in held.key_indices] == [[1], [2]]
    assert [pages.tolist() for pages in held.pages] == [store.pages[0].tolist()[1:], [0]]
    assert manager._hold([["x"], []]) is None
    manager.complete(held)
    # The end of a prompt is evicted first, also if it was held.
    assert manager.prepare_store([["n"], []]).pages[0].tolist() == held.pages[0].tolist()


def test_a_lookup_holds_what_its_prefix_needs():
    manager = BlockManager([BlockGroup(3, 16), BlockGroup(3, 16, is_state=True)])
    keys = [["a", "b", "c"], ["x", "y", "z"]]
    manager.complete(manager.prepare_store(keys))
    assert manager.lookup([["n"], ["n"]], hold=True).lease is None
    found = manager.lookup([["a", "b", "c", "d"], ["x", "y", "z", "n"]], hold=True)
    assert manager.prepare_store([["n"], []]) is None
    assert manager.prepare_store([[], ["l", "m", "n"]]) is None
    manager.complete(manager.prepare_store([[], ["m", "n"]]))
    assert manager.lookup(keys, again=True) == Lookup(3, 3, 0)
    assert found.lease.let_go()
    assert manager.stats().loaded == 0
    assert manager.prepare_store([["n"], []]).pages[0].tolist() == [2], "the order has not changed"


def test_a_dropped_reservation_loses_its_pages():
    manager = BlockManager(4)
    stored(manager, ["a"])
    manager.prepare_load(["a"])
    manager.prepare_store(["b"])
    assert manager.lookup(["b"]).found == 0, "nobody waits for it"
    assert manager.lookup(["a"]).found == 0, "another store may write the page that is still read"
    manager.reset()
    assert (manager.stats().free_pages, manager.stats().failed) == (2, 2)
    assert manager.prepare_store(["c", "d", "e"]) is None


def test_a_dropped_lease_ends_its_hold():
    manager = BlockManager(2)
    stored(manager, ["a", "b"])
    found = manager.lookup(["a", "b"], hold=True)
    held = manager.prepare_store(["a"], hold=True)
    assert manager.prepare_store(["c", "d"]) is None
    del found, held
    assert manager.prepare_store(["c", "d"]) is not None


@pytest.mark.skipif("LD_PRELOAD" in os.environ, reason="sanitizers keep freed memory")
def test_a_reservation_may_outlive_its_manager():
    run_script("""
    import resource
    from pathlib import Path
    from torch_kvswap.prefix import BlockManager
    keys = b"".join(n.to_bytes(32, "little") for n in range(100_000))

    def reserve_and_drop():
        manager = BlockManager(100_000)
        reservation = manager.prepare_store(keys)  # a megabyte
        del manager
        assert reservation.is_held

    reserve_and_drop()
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + (50 << 20), -1))
    for _ in range(60):
        reserve_and_drop()
    """)


def test_errors_say_what_was_wrong():
    manager, two = BlockManager(4), BlockManager([BlockGroup(4), BlockGroup(4)])
    store = manager.prepare_store(["a", "b"])
    of_rejected = [error_text(manager.complete, store, some) for some in (1, [2], [-1], [0, 0])]
    manager.complete(store)
    assert manager.lookup(["a", "b"]).ready == 2
    held = manager.prepare_store(["a"], hold=True)
    errors = [
        error_text(BlockManager, "4"),
        error_text(BlockManager, 0),
        error_text(BlockManager, []),
        error_text(BlockManager, [4]),
        error_text(BlockManager, [BlockGroup(4, 2**31 - 1 - i) for i in range(4)]),
        error_text(BlockManager, 1, eviction_policy="lfu"),
        error_text(BlockManager, 4, store_threshold=2**32),
        error_text(BlockManager, 4, num_ready_pages=5),
        error_text(BlockManager, 4, num_ready_pages="4"),
        error_text(two.grow, 4),
        error_text(two.grow, [4, -1]),
        error_text(manager.lookup, b"123"),
        error_text(manager.lookup, "abc"),
        error_text(manager.lookup, [array("q", range(32))]),
        error_text(two.lookup, None),
        error_text(two.lookup, ["a"]),
        error_text(two.prepare_store, [["a"], ["a", "b", "a"]]),
        error_text(manager.needed_blocks, 2**64),
        *of_rejected,
        error_text(manager.complete, None),
        error_text(two.complete, store),
    ]
    assert_expected_inline(
        re.sub(r"reservation \d+", "reservation ~", "\n".join(errors)),
        """\
TypeError: groups is a str; pass a number of pages, or a list with a BlockGroup for each
group of layers
ValueError: groups is 0; it must be 1 to 536870912
ValueError: groups is empty; pass at least one BlockGroup
TypeError: groups[0] is an int; pass a BlockGroup
ValueError: blocks of [2147483647, 2147483646, 2147483645, 2147483644] tokens end
together only every 10633823916761725492519750755069984780 tokens; give the groups
block_tokens that divide each other
ValueError: eviction_policy is 'lfu'; it must be 'lru' or 'arc'
ValueError: store_threshold is 4294967296; it must be 1 to 4294967295
ValueError: num_ready_pages of group 0 is 5; it must be 0 to 4
TypeError: num_ready_pages is a str; pass a number for each group
ValueError: num_ready_pages is 4; the groups have [4, 4] pages
ValueError: num_ready_pages of group 1 is -1; it must be 0 to 4
ValueError: keys has 3 bytes, but a key has 32; pass keys in a row, or a list of keys
TypeError: keys is a str; pass keys of a PrefixHasher, or a list of keys
TypeError: keys[0]: an array cannot be part of a key; use None, bool, int, float, str,
bytes and tuples of them
TypeError: keys is None; pass a list with an item for each group
ValueError: keys has 1 item for 2 groups; pass one for each group, an empty one for a
group without blocks
ValueError: keys[1][2] is the same key as keys[1][0]; name a block once
ValueError: prefix is 18446744073709551616; it must be 0 to 9223372036854775807
TypeError: rejected is an int; pass a list, numpy array or CPU tensor
ValueError: rejected[0] is 2; the reservation has 2 pages: pass positions below 2, in
ascending order
ValueError: rejected[0] is -1; the reservation has 2 pages: pass positions below 2, in
ascending order
ValueError: rejected[1] is 0; the reservation has 2 pages: pass positions below 2, in
ascending order
TypeError: reservation is None; pass what prepare_load() or prepare_store() returned
ValueError: reservation ~ has ended before, or is another manager's""",
    )
    manager.complete(held.lease)


@pytest.mark.parametrize(("blocks", "resets"), [(50, False), (50, True), (1100, True)])
def test_threads_may_share_a_manager(blocks, resets):
    pages = 8 * blocks
    manager, over = BlockManager(pages), threading.Event()
    prompts = [os.urandom(32 * blocks) for _ in range(16)]
    writers = np.zeros(pages, np.int64)
    wrong = []

    def serve(seed):
        rng = np.random.default_rng(seed)
        for _ in range(300):
            prompt = prompts[int(rng.integers(16))]
            load = manager.prepare_load(prompt[: 32 * manager.lookup(prompt).ready])
            store = manager.prepare_store(prompt)
            if store and store.id:
                writers[store.pages] += 1
                if (writers[store.pages] != 1).any():
                    wrong.append(store)
                writers[store.pages] -= 1
                manager.complete(store)
            if load:
                manager.complete(load)

    def watch():
        while not over.is_set():
            manager.grow()  # lets the GIL go
            manager.stats()
            if resets:
                manager.reset()

    watcher = threading.Thread(target=watch)
    threads = [threading.Thread(target=serve, args=(seed,)) for seed in range(4)]
    for thread in (watcher, *threads):
        thread.start()
    for thread in threads:
        thread.join()
    over.set()
    watcher.join()
    assert not wrong
    stats = manager.stats()
    assert stats.free_pages + stats.idle_pages == pages


# Which blocks of each group of layers a prefix needs.


@pytest.mark.parametrize(
    ("window_tokens", "block_tokens", "blocks"),
    [(None, 16, 0), (1, 16, 1), (16, 16, 1), (17, 16, 1), (18, 16, 2), (33, 16, 2), (128, 16, 8)],
)
def test_a_window_needs_what_its_token_sees(window_tokens, block_tokens, blocks):
    group = BlockGroup(1, block_tokens, window_tokens)
    assert group.window == blocks
    if window_tokens is not None and window_tokens > 1:
        end = 100 * block_tokens  # the next token, which sees itself and those before it
        seen = {token // block_tokens for token in range(end - window_tokens + 1, end)}
        assert [*BlockManager([group]).needed_blocks(100)[0]] == sorted(seen)


def test_a_prefix_ends_where_all_blocks_end():
    groups = [BlockGroup(1, 6), BlockGroup(1, 4, window_tokens=9), BlockGroup(1, 12, is_state=True)]
    assert unit_tokens(groups) == 12
    manager = BlockManager(groups)
    assert manager.needed_blocks(3) == [range(6), range(7, 9), range(2, 3)]
    assert manager.needed_blocks(0) == [range(0), range(0), range(0)]


def test_a_groups_fields_are_checked_when_made():
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
TypeError: is_state is 'no'; it must be True or False
ValueError: window_tokens is 4 and is_state is True; layers have a window or a state:
pass one of them""",
    )
    group = BlockGroup(np.int32(4), np.int64(2), window_tokens=np.uint8(8))
    assert [type(number) for number in (group.num_pages, group.block_tokens)] == [int, int]
    assert group == BlockGroup(4, 2, 8)


# What the block manager does for a second tier: blocks that are due, held, promoted and abandoned.


def due(manager: BlockManager, keys: str, count: int = 100, end: bool = True) -> str:
    """Which of the keys are due, in order. They are below from then on."""
    found = manager._hold_due(count, 0)
    if found is None:
        return ""
    held, joined, _ = found
    hashed = [joined[at : at + KEY_BYTES] for at in range(0, len(joined), KEY_BYTES)]
    names = {hash_key(key): key for key in keys}
    assert len(hashed) == len(held.pages)
    if end:
        manager.complete(held)
    return "".join(names[key] for key in hashed)


def evicted(manager: BlockManager, count: int) -> list[int]:
    """The pages that so many new blocks take, in the order of their eviction."""
    store = manager.prepare_store([f"new {place}" for place in range(count)])
    assert store is not None
    return list(store.evicted)


def test_blocks_are_due_once_stored_or_used() -> None:
    everything, used = (BlockManager(8, below_policy=policy) for policy in ("all", "reused"))  # type: ignore[arg-type]
    for manager in (everything, used, BlockManager(8)):
        stored(manager, list("abc"))
        running = manager.prepare_store(["d"])
        load = manager.prepare_load(["b"])
        assert load is not None
        manager.touch(["c", "d"])
        expected = "abc" if manager is everything else "bc" if manager is used else ""
        assert sorted(due(manager, "abcd")) == sorted(expected)
        assert due(manager, "abcd") == ""
        manager.complete(load)
        manager.complete(running)
        assert due(manager, "abcd") == ("d" if manager is everything else "")


def test_due_blocks_come_first_and_again() -> None:
    manager = BlockManager(8, below_policy="all")
    for key in "abcd":
        stored(manager, [key])
    manager.complete(manager._hold_due(3, 0)[0], rejected=[1])  # type: ignore[index]
    assert due(manager, "abcd") == "db"
    stored(manager, ["e"])
    manager.fail(manager._hold_due(1, 0)[0])  # type: ignore[index]
    assert due(manager, "abcde") == "e"


def test_each_group_has_blocks_that_are_due() -> None:
    manager = BlockManager([BlockGroup(4), BlockGroup(4)], below_policy="all")
    store = manager.prepare_store([["a"], ["b", "c"]])
    manager.complete(store)
    held = [manager._hold_due(9, group)[0].pages for group in range(2)]  # type: ignore[index]
    assert [[len(pages) for pages in of_groups] for of_groups in held] == [[1, 0], [0, 2]]


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_held_blocks_stay_and_keep_their_turn(policy: str) -> None:
    def order(is_held: bool) -> list[int]:
        manager = BlockManager(6, eviction_policy=policy, below_policy="all")
        for key in "abcdef":
            stored(manager, [key])
        if is_held:
            held = manager._hold_due(3, 0)
            assert held is not None
            assert manager.stats().idle_pages == 3
            assert manager.prepare_store(list("uvwx")) is None
            manager.complete(held[0])
        return evicted(manager, 6)

    assert order(True) == order(False)
    manager = BlockManager(3, eviction_policy=policy, below_policy="all")
    for key in "abc":
        stored(manager, [key])
    held = manager._hold_due(1, 0)
    assert held is not None
    assert set(evicted(manager, 2)).isdisjoint(held[0].pages.tolist())


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_a_store_renews_a_block_being_written(policy: str) -> None:
    def order(is_held: bool) -> list[int]:
        manager = BlockManager(4, eviction_policy=policy, below_policy="all")
        for key in "abc":
            stored(manager, [key])
        held = manager._hold_due(2, 0) if is_held else None
        stored(manager, ["a", "d"])
        if held is not None:
            manager.complete(held[0])
        return evicted(manager, 4)

    assert order(True) == order(False)


def test_due_blocks_evicted_count_as_lost() -> None:
    manager = BlockManager(4, below_policy="all")
    stored(manager, list("abcd"))
    assert due(manager, "abcd", 1) != ""
    evicted(manager, 4)
    assert (manager.stats().evicted, manager.stats().lost) == (4, 3)
    manager.reset()
    assert manager.stats().lost == 3
    assert due(manager, "") == ""


@pytest.mark.parametrize("by", ["a failed load", "a reset"])
def test_blocks_forgotten_while_written_are_not_below(by: str) -> None:
    manager = BlockManager(4, below_policy="all")
    stored(manager, ["a"])
    held = manager._hold_due(1, 0)
    assert held is not None
    if by == "a reset":
        manager.reset()
    else:
        manager.fail(manager.prepare_load(["a"]))  # type: ignore[arg-type]
    assert manager.stats().free_pages == 3, "the page may still be read"
    stored(manager, ["a"])
    manager.complete(held[0])
    assert due(manager, "a") == "a", "it is another page"


def test_promoted_blocks_are_pending_then_ready() -> None:
    manager = BlockManager(4, store_threshold=2, below_policy="all")
    promotion = manager._promote(["a", "b"], manager.resets)
    assert promotion is not None
    assert manager.lookup(["a", "b"]) == Lookup(2, 0, 2)
    manager.complete(promotion, rejected=[1])
    assert manager.lookup(["a", "b"]) == Lookup(1, 1, 0)
    assert (manager.stats().promoted, manager.stats().stored, manager.stats().failed) == (1, 0, 1)
    assert due(manager, "a") == ""
    assert manager._promote(list("abcde"), manager.resets) is None


def test_an_abandoned_promotion_holds_pages_until_its_end() -> None:
    manager = BlockManager(4)
    promotion = manager._promote(["a", "b"], manager.resets)
    assert promotion is not None
    manager._abandon(promotion)
    assert manager.lookup(["a", "b"]).found == 0
    assert manager.stats().failed == 2
    manager.reset()
    assert (manager.stats().free_pages, manager.prepare_store(list("vwx"))) == (2, None)
    again = manager._promote(["a", "b"], manager.resets)
    manager.complete(promotion)
    assert manager.lookup(["a", "b"]) == Lookup(2, 0, 2), "those that came later wait for their own"
    assert manager.stats().failed == 2
    manager.complete(again)
    assert manager.lookup(["a", "b"]).ready == 2
    with pytest.raises(ValueError, match="has ended before"):
        manager._abandon(promotion)


def test_a_wrong_below_policy_is_refused() -> None:
    with pytest.raises(ValueError, match="below_policy is 'some'; it must be 'reused' or 'all'"):
        BlockManager(4, below_policy="some")  # type: ignore[arg-type]
