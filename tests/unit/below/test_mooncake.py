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
from store_calls import PAGE, check_put_get_and_delete, get_pages, pages, put_pages, trailers

from torch_kvswap.below import MooncakeStore

__all__ = ["cluster"]

PROMPT = list("abcdefgh")


@pytest.fixture
def store(cluster: MooncakeCluster) -> Iterator[MooncakeStore]:
    connected = MooncakeStore(cluster.url)
    yield connected
    connected.close()


def test_what_was_put_stays_until_deleted(store: MooncakeStore) -> None:
    # A Mooncake store gives a page that was just read a lease.
    check_put_get_and_delete(store)


@pytest.mark.parametrize(("size", "code"), [(1, -800), (PAGE - 1, -800), (PAGE + 1, -600)])
def test_a_page_of_another_size_is_an_error(store: MooncakeStore, size: int, code: int) -> None:
    store.put(["key"], pages(b"k", nbytes=size), trailers(b"t"))
    with pytest.raises(OSError, match=f"key: Mooncake's error {code}"):
        get_pages(store, ["key"])


def test_a_page_that_exists_stays(store: MooncakeStore) -> None:
    put_pages(store, ["a"])
    store.put(["a"], pages(b"b"), trailers(b"B"))
    assert get_pages(store, ["a"]) == [True]


def test_memory_is_registered_once(store: MooncakeStore) -> None:
    pool, ends = pages(*[b"p"] * 8), trailers(*[b"t"] * 8)
    for page, trailer in zip(pool, ends, strict=True):
        store.put(["key"], [page], [trailer])
        assert len(store._registered) == 2
    del pool, page, ends, trailer
    assert store.get(["key"], pages(b"."), trailers(b".")) == [True]
    assert len(store._registered) == 2


def test_pages_of_a_killed_owner_become_unreadable(
    cluster: MooncakeCluster, store: MooncakeStore
) -> None:
    with Engine(cluster.url) as writer:
        writer.share(PROMPT)
        put_pages(store, ["a", "b"])
        with Engine(cluster.url) as reader:
            kill(cluster.owner)
            assert store.exists(["a", "b"]) == [True, True]
            with pytest.raises(OSError, match="Mooncake's error"):
                get_pages(store, ["a", "b"])
            assert reader.load(PROMPT) == 0
            assert (reader.stats.promoted, reader.stats.damaged) == (0, 0)
        cluster.start_owner()
        assert in_time(lambda: can_put(store, "c"))
        assert get_pages(store, ["c"]) == [True]


def test_a_restarted_master_is_empty_and_usable(
    cluster: MooncakeCluster, store: MooncakeStore
) -> None:
    put_pages(store, ["a"])
    kill(cluster.master)
    with pytest.raises(OSError, match="a: Mooncake's error -900"):
        store.exists(["a", "b"])
    cluster.start_master()
    assert in_time(lambda: can_put(store, "b")), "its owner and we find it by ourselves"
    assert store.exists(["a", "b"]) == [False, True]
    assert get_pages(store, ["b"]) == [True]


def test_a_store_without_room_refuses_a_page(store: MooncakeStore) -> None:
    with pytest.raises(OSError, match="large: Mooncake's error -200"):
        store.put(["large"], pages(b"x", nbytes=512 << 20), trailers(b"t"))
    put_pages(store, ["b"])
    assert get_pages(store, ["b"]) == [True]


def test_a_store_connects_when_it_is_there(cluster: MooncakeCluster) -> None:
    kill(cluster.master)
    store = MooncakeStore(cluster.url)
    with pytest.raises(ConnectionError, match=r"cannot connect to 127\.0\.0\.1"):
        store.exists(["a"])
    cluster.start_master()
    assert in_time(lambda: can_put(store, "a"))
    store.close()


def can_put(store: MooncakeStore, key: str) -> bool:
    try:
        put_pages(store, [key])
    except OSError:
        return False
    return True


@pytest.mark.parametrize(
    "url",
    [
        *("mooncake:", "mooncake://there/1", "mooncake://there:port", "valkey://there"),
        "mooncake://user:secret@there",
    ],
)
def test_urls_that_name_no_master_are_refused(url: str) -> None:
    assert error_text(MooncakeStore, url).startswith(
        "ValueError: below is not the URL of a Mooncake"
    )
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
