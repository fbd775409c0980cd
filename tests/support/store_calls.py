"""Calls of a store of pages, and memory for them."""

from __future__ import annotations

import mmap

from torch_kvswap.below import PageStore

PAGE, TRAILER = 8192, 4096


def pages(*fills: bytes, nbytes: int = PAGE) -> list[memoryview]:
    """Aligned memory for a page of each of these bytes."""
    memory = memoryview(mmap.mmap(-1, nbytes * len(fills)))
    views = [memory[place * nbytes : (place + 1) * nbytes] for place in range(len(fills))]
    for view, fill in zip(views, fills, strict=True):
        view[:] = fill * nbytes
    return views


def trailers(*fills: bytes) -> list[memoryview]:
    """Aligned memory for a trailer of each of these bytes."""
    return pages(*fills, nbytes=TRAILER)


def put_pages(store: PageStore, keys: list[str]) -> None:
    fills = list(map(str.encode, keys))
    store.put(keys, pages(*fills), trailers(*(fill.upper() for fill in fills)))


def get_pages(store: PageStore, keys: list[str]) -> list[bool]:
    """For each key whether it came, with the right bytes."""
    into, ends = pages(*[b"."] * len(keys)), trailers(*[b"."] * len(keys))
    came = store.get(keys, into, ends)
    for key, page, trailer, is_right in zip(keys, into, ends, came, strict=True):
        fill = key.encode() if is_right else b"."
        assert (page, trailer) == (fill * PAGE, fill.upper() * TRAILER)
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
    assert (store.exists([]), store.get([], [], [])) == ([], [])
    store.put([], [], [])
    for fill, nbytes in ((b"x", PAGE), (b"y", PAGE), (b"z", 16 << 20)):
        (page,), (trailer,) = pages(fill, nbytes=nbytes), trailers(b"t")
        page[:100], trailer[-100:] = b"-" * 100, fill * 100
        store.put(["key"], [page], [trailer])
        (into,), (end,) = pages(b".", nbytes=nbytes), trailers(b".")
        assert store.get(["key"], [into], [end]) == [True]
        assert (into, end) == (page, trailer)
        store.delete(["key"])
