"""Calls of a store of pages, and memory for them."""

from __future__ import annotations

import mmap
import select

from patience import PATIENCE

from torch_kvswap.below import Completion, PageStore

PAGE = 8192


def pages(*fills: bytes, nbytes: int = PAGE) -> list[memoryview]:
    """Aligned memory for a page of each of these bytes."""
    memory = memoryview(mmap.mmap(-1, nbytes * len(fills)))
    views = [memory[place * nbytes : (place + 1) * nbytes] for place in range(len(fills))]
    for view, fill in zip(views, fills, strict=True):
        view[:] = fill * nbytes
    return views


def outcome(store: PageStore, number: int) -> Completion:
    """What the store says of its only call."""
    readable, _, _ = select.select([store.event_fd()], [], [], PATIENCE)
    assert readable
    (completion,) = store.drain_completions()
    assert completion[0] == number
    assert not select.select([store.event_fd()], [], [], 0)[0]
    return completion


def set_pages(store: PageStore, keys: list[str]) -> bool:
    return outcome(store, store.submit_batch_set(keys, pages(*map(str.encode, keys))))[1]


def get_pages(store: PageStore, keys: list[str]) -> list[bool]:
    """For each key whether it came, with the right bytes."""
    into = pages(*[b"."] * len(keys))
    came = outcome(store, store.submit_batch_get(keys, into))[3]
    assert came is not None
    for key, view, is_right in zip(keys, into, came, strict=True):
        assert not is_right or view == key.encode() * PAGE
    return list(came)


def check_set_get_and_delete(store: PageStore) -> None:
    """What was set is there until it is deleted, also directly after it was read. A key that is
    missing is not an error, and the calls behind it get their own answers."""
    assert set_pages(store, ["a", "b"])
    assert outcome(store, store.submit_batch_exists(["a", "b", "c"]))[3] == [True, True, False]
    into = pages(b".", b".", b".")
    answer = outcome(store, store.submit_batch_get(["a", "c", "b"], into))
    assert answer[1:] == (True, "", [True, False, True])
    assert [view[0] for view in into] == list(b"a.b")
    assert get_pages(store, ["a", "b"]) == [True, True]
    assert outcome(store, store.submit_batch_delete(["a", "c"]))[1:] == (True, "", [True, False])
    assert outcome(store, store.submit_batch_exists(["a", "b"]))[3] == [False, True]
    assert outcome(store, store.submit_batch_exists([]))[1]
