"""What the block manager does for a second tier: blocks that are due, held, promoted and abandoned."""

from __future__ import annotations

import pytest

from torch_kvswap.prefix import BlockGroup, BlockManager
from torch_kvswap.prefix.hashing import KEY_BYTES, hash_key


def stored(manager: BlockManager, keys: list[str]) -> None:
    store = manager.prepare_store(keys)
    assert store is not None
    manager.complete(store)


def due(manager: BlockManager, keys: str, count: int = 100, end: bool = True) -> str:
    """Which of the keys are due, in order. They are below from then on."""
    held = manager.hold_due(count)
    if held is None:
        return ""
    hashed = [held.keys[at : at + KEY_BYTES] for at in range(0, len(held.keys), 32)]
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


def test_blocks_are_due_once_when_they_are_stored_or_when_they_are_used() -> None:
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


def test_blocks_that_were_due_first_come_first_and_again_if_they_were_not_written() -> None:
    manager = BlockManager(8, below_policy="all")
    for key in "abcd":
        stored(manager, [key])
    held = manager.hold_due(3)
    assert held is not None
    manager.complete(held, rejected=[1])
    assert due(manager, "abcd") == "db"
    stored(manager, ["e"])
    failed = manager.hold_due(1)
    manager.fail(failed)
    assert due(manager, "abcde") == "e"


def test_each_group_has_blocks_that_are_due() -> None:
    manager = BlockManager([BlockGroup(4), BlockGroup(4)], below_policy="all")
    store = manager.prepare_store([["a"], ["b", "c"]])
    manager.complete(store)
    counts = [len(manager.hold_due(9, group).pages) for group in range(2)]  # type: ignore[union-attr]
    assert counts == [1, 2]


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_held_blocks_are_not_evicted_and_keep_their_turn(policy: str) -> None:
    def order(is_held: bool) -> list[int]:
        manager = BlockManager(6, eviction_policy=policy, below_policy="all")
        for key in "abcdef":
            stored(manager, [key])
        if is_held:
            held = manager.hold_due(3)
            assert held is not None
            assert manager.stats().idle_pages == 3
            assert manager.prepare_store(list("uvwx")) is None
            manager.complete(held)
        return evicted(manager, 6)

    assert order(True) == order(False)
    manager = BlockManager(3, eviction_policy=policy, below_policy="all")
    for key in "abc":
        stored(manager, [key])
    held = manager.hold_due(1)
    assert held is not None
    assert set(evicted(manager, 2)).isdisjoint(held.pages.tolist())


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_a_store_that_names_a_block_renews_it_also_while_it_is_written(policy: str) -> None:
    def order(is_held: bool) -> list[int]:
        manager = BlockManager(4, eviction_policy=policy, below_policy="all")
        for key in "abc":
            stored(manager, [key])
        held = manager.hold_due(2) if is_held else None
        stored(manager, ["a", "d"])
        if held is not None:
            manager.complete(held)
        return evicted(manager, 4)

    assert order(True) == order(False)


def test_blocks_that_are_evicted_while_they_are_due_are_counted_as_lost() -> None:
    manager = BlockManager(4, below_policy="all")
    stored(manager, list("abcd"))
    assert due(manager, "abcd", 1) != ""
    evicted(manager, 4)
    assert (manager.stats().evicted, manager.stats().lost) == (4, 3)
    manager.reset()
    assert manager.stats().lost == 3
    assert due(manager, "") == ""


@pytest.mark.parametrize("by", ["a failed load", "a reset"])
def test_blocks_that_are_forgotten_while_they_are_written_are_not_below(by: str) -> None:
    manager = BlockManager(4, below_policy="all")
    stored(manager, ["a"])
    held = manager.hold_due(1)
    assert held is not None
    if by == "a reset":
        manager.reset()
    else:
        manager.fail(manager.prepare_load(["a"]))  # type: ignore[arg-type]
    assert manager.stats().free_pages == 3, "the page may still be read"
    stored(manager, ["a"])
    manager.complete(held)
    assert due(manager, "a") == "a", "it is another page"


def test_promoted_blocks_are_pending_then_leased_and_not_written_again() -> None:
    manager = BlockManager(4, store_threshold=2, below_policy="all")
    promotion = manager.promote(["a", "b"])
    assert promotion is not None
    assert manager.lookup(["a", "b"]) == (2, 0, 2, 0)
    manager.complete(promotion, rejected=[1])
    assert manager.lookup(["a", "b"]) == (1, 1, 0, 0)
    assert manager.prepare_store(list("vwxy")) is not None, "below the threshold: nothing is stored"
    manager.lookup(list("vwxy"))
    manager.lookup(list("vwxy"))
    assert manager.prepare_store(list("vwxy")) is None, "a is leased"
    assert manager.release(promotion)
    assert (manager.stats().promoted, manager.stats().stored, manager.stats().failed) == (1, 0, 1)
    assert due(manager, "a") == ""
    assert manager.promote(list("abcde")) is None


def test_an_abandoned_promotion_is_forgotten_and_holds_its_pages_until_it_ends() -> None:
    manager = BlockManager(4)
    promotion = manager.promote(["a", "b"])
    assert promotion is not None
    manager.abandon(promotion)
    manager.release(promotion)
    assert manager.lookup(["a", "b"]).found == 0
    manager.reset()
    assert (manager.stats().free_pages, manager.prepare_store(list("vwx"))) == (2, None)
    again = manager.promote(["a", "b"])
    manager.complete(promotion)
    assert manager.lookup(["a", "b"]) == (2, 0, 2, 0), "those that came later wait for their own"
    manager.complete(again)
    assert manager.lookup(["a", "b"]).ready == 2
    with pytest.raises(ValueError, match="has ended before"):
        manager.abandon(promotion)


def test_wrong_arguments_are_refused() -> None:
    manager = BlockManager(4, below_policy="all")
    with pytest.raises(ValueError, match="count is 0"):
        manager.hold_due(0)
    with pytest.raises(ValueError, match="group is 1"):
        manager.hold_due(1, 1)
    with pytest.raises(TypeError, match="reservation is None"):
        manager.abandon(None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="below_policy is 'some'; it can be reused or all"):
        BlockManager(4, below_policy="some")  # type: ignore[arg-type]
