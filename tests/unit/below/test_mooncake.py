"""A Mooncake store as a store of pages: full, with a killed owner, with a new master."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
from below_engine import Engine
from error_text import error_text
from expecttest import assert_expected_inline
from mooncake_cluster import MooncakeCluster, cluster, kill
from patience import in_time
from store_calls import PAGE, check_set_get_and_delete, get_pages, outcome, pages, set_pages

from torch_kvswap.below import MooncakeStore

__all__ = ["cluster"]

PROMPT = list("abcdefgh")


@pytest.fixture
def store(cluster: MooncakeCluster) -> Iterator[MooncakeStore]:
    connected = MooncakeStore(cluster.url)
    yield connected
    connected.close()


def test_what_was_set_is_there_until_it_is_deleted(store: MooncakeStore) -> None:
    # A Mooncake store gives a page that was just read a lease.
    check_set_get_and_delete(store)


def test_a_page_takes_the_place_of_another_one(store: MooncakeStore) -> None:
    for fill, nbytes in ((b"x", PAGE), (b"y", PAGE), (b"z", 16 << 20)):
        (page,) = pages(fill, nbytes=nbytes)
        assert outcome(store, store.submit_batch_set(["key"], [page]))[1]
        (into,) = pages(b".", nbytes=nbytes)
        assert outcome(store, store.submit_batch_get(["key"], [into]))[1]
        assert into == page


@pytest.mark.parametrize("size", [1, PAGE - 1, PAGE + 1])
def test_a_page_of_another_size_is_not_there_or_an_error(store: MooncakeStore, size: int) -> None:
    assert set_pages(store, ["g"])
    assert outcome(store, store.submit_batch_set(["key"], pages(b"k", nbytes=size)))[1]
    _, is_right, error, are_right = outcome(
        store, store.submit_batch_get(["key", "g"], pages(b".", b"."))
    )
    meant = "key: Mooncake's error -600" if size > PAGE else ""
    assert (is_right, error, are_right) == (not meant, meant, [False, True])


def test_memory_is_registered_once_as_a_whole_while_it_is_there(store: MooncakeStore) -> None:
    pool = pages(*[b"p"] * 8)
    for page in pool:
        assert outcome(store, store.submit_batch_set(["key"], [page]))[1]
        assert len(store._registered) == 1
    del pool, page
    other = pages(b".")
    assert outcome(store, store.submit_batch_get(["key"], other))[1]
    assert len(store._registered) == 1


def test_pages_of_a_killed_owner_exist_for_a_while_and_cannot_be_read(
    cluster: MooncakeCluster, store: MooncakeStore
) -> None:
    with Engine(cluster.url) as writer:
        writer.share(PROMPT)
        assert set_pages(store, ["a", "b"])
        with Engine(cluster.url) as reader:
            kill(cluster.owner)
            assert outcome(store, store.submit_batch_exists(["a", "b"]))[3] == [True, True]
            assert get_pages(store, ["a", "b"]) == [False, False]
            assert reader.load(PROMPT) == 0
            assert (reader.stats.promoted, reader.stats.damaged) == (0, 0)
        cluster.start_owner()
        assert in_time(lambda: set_pages(store, ["c"]))
        assert get_pages(store, ["c"]) == [True]


def test_a_master_that_starts_again_has_nothing_and_takes_pages(
    cluster: MooncakeCluster, store: MooncakeStore
) -> None:
    assert set_pages(store, ["a"])
    kill(cluster.master)
    _, is_right, error, there = outcome(store, store.submit_batch_exists(["a", "b"]))
    assert (is_right, error, there) == (False, "Mooncake's error -900", [False, False])
    cluster.start_master()
    assert in_time(lambda: set_pages(store, ["b"])), "its owner and we find it by ourselves"
    assert outcome(store, store.submit_batch_exists(["a", "b"]))[3] == [False, True]
    assert get_pages(store, ["b"]) == [True]


def test_a_store_without_room_refuses_a_page(store: MooncakeStore) -> None:
    assert set_pages(store, ["a"])
    (large,) = pages(b"x", nbytes=512 << 20)
    _, is_right, error, taken = outcome(store, store.submit_batch_set(["large"], [large]))
    assert (is_right, error, taken) == (False, "large: Mooncake's error -200", [False])
    assert get_pages(store, ["a"]) == [True]


def test_a_store_is_connected_to_when_it_is_there(cluster: MooncakeCluster) -> None:
    kill(cluster.master)
    store = MooncakeStore(cluster.url)
    _, is_right, error, _ = outcome(store, store.submit_batch_exists(["a"]))
    assert (is_right, "cannot connect to 127.0.0.1" in error) == (False, True)
    cluster.start_master()
    assert in_time(lambda: set_pages(store, ["a"]))
    store.close()
    store.close()


@pytest.mark.parametrize(
    "url", ["mooncake:", "mooncake://there/1", "valkey://there", "mooncake://user:secret@there"]
)
def test_urls_that_name_no_master_are_refused(url: str) -> None:
    assert error_text(MooncakeStore, url).startswith("ValueError: below is no URL of a Mooncake")
    assert "secret" not in error_text(MooncakeStore, url)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake.store", None)
    assert_expected_inline(
        error_text(MooncakeStore, "mooncake://there"),
        """\
ImportError: Mooncake cannot be used: import of mooncake.store halted; None in
sys.modules; install it with pip install 'torch_kvswap[mooncake]', and libibverbs1 from
your system's packages""",
    )
