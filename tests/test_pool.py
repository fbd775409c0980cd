import pytest

from torch_kvswap.pool import Pool, Ring


def test_an_item_is_made_only_when_none_is_idle() -> None:
    numbers = iter(range(10))
    pool = Pool(lambda: next(numbers))
    first, second = pool.take(), pool.take()
    pool.give(first)
    assert pool.take() == first
    assert (pool.created, pool.idle, pool.in_use) == (2, 0, 2)
    pool.give(first)
    pool.give(second)
    assert (pool.created, pool.idle, pool.in_use) == (2, 2, 0)


def test_an_item_that_cannot_be_made_is_not_counted() -> None:
    def fail() -> int:
        raise MemoryError("no more")

    pool = Pool(fail)
    with pytest.raises(MemoryError, match="no more"):
        pool.take()
    assert (pool.created, pool.idle) == (0, 0)


def test_clearing_lets_idle_items_go_and_counts_those_in_use() -> None:
    pool = Pool(object)
    taken, given = pool.take(), pool.take()
    pool.give(given)
    pool.clear()
    assert (pool.created, pool.idle, pool.in_use) == (1, 0, 1)
    pool.give(taken)
    assert pool.take() is taken


def test_a_ring_makes_all_its_items_at_once_and_hands_them_out_in_turn() -> None:
    numbers = iter(range(10))
    freed: list[int] = []
    ring = Ring(lambda: next(numbers), freed.append, 3)
    assert next(numbers) == 3
    assert [ring.next() for _ in range(7)] == [0, 1, 2, 0, 1, 2, 0]
    ring.clear()
    ring.clear()
    assert sorted(freed) == [0, 1, 2]


def test_a_ring_that_cannot_be_made_whole_is_not_made() -> None:
    freed: list[int] = []
    numbers = iter([5, 6])
    with pytest.raises(StopIteration):
        Ring(lambda: next(numbers), freed.append, 3)
    assert sorted(freed) == [5, 6]
