"""Calls of a store of pages, and memory for them."""

from __future__ import annotations

import mmap

from torch_kvswap.below import PageStore

PAGE = 8192


def pages(*fills: bytes, nbytes: int = PAGE) -> list[memoryview]:
    """Aligned memory for a page of each of these bytes."""
    memory = memoryview(mmap.mmap(-1, nbytes * len(fills)))
    views = [memory[place * nbytes : (place + 1) * nbytes] for place in range(len(fills))]
    for view, fill in zip(views, fills, strict=True):
        view[:] = fill * nbytes
    return views


def put_pages(store: PageStore, keys: list[str]) -> None:
    store.put(keys, pages(*map(str.encode, keys)))


def get_pages(store: PageStore, keys: list[str]) -> list[bool]:
    """For each key whether it came, with the right bytes."""
    into = pages(*[b"."] * len(keys))
    came = store.get(keys, into)
    for key, view, is_right in zip(keys, into, came, strict=True):
        assert view == (key.encode() if is_right else b".") * PAGE
    return came


def check_put_get_and_delete(store: PageStore) -> None:
    """What was put is there until it is deleted, also directly after it was read. What is missing
    is no failure, and the keys behind it get their own answers."""
    put_pages(store, ["a", "b"])
    assert store.exists(["a", "b", "c"]) == [True, True, False]
    assert get_pages(store, ["a", "c", "b"]) == [True, False, True]
    assert get_pages(store, ["a", "b"]) == [True, True]
    store.delete(["a", "c"])
    assert store.exists(["a", "b"]) == [False, True]
    assert (store.exists([]), store.get([], [])) == ([], [])
    store.put([], [])
    for fill, nbytes in ((b"x", PAGE), (b"y", PAGE), (b"z", 16 << 20)):  # one in place of another
        (page,) = pages(fill, nbytes=nbytes)
        page[:100] = b"-" * 100
        store.put(["key"], [page])
        (into,) = pages(b".", nbytes=nbytes)
        assert store.get(["key"], [into]) == [True]
        assert into == page
