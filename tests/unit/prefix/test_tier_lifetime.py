"""The life of a second tier's threads and store, and the arguments that make one."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from below_engine import Engine, hurry, key_of
from error_text import error_text
from expecttest import assert_expected_inline
from logged import logged
from memory_store import MemoryStore
from patience import in_time

from torch_kvswap import HostPool, PagedLayout, PrefixCache
from torch_kvswap.below.files import FileStore
from torch_kvswap.prefix import cache
from torch_kvswap.prefix.manager import Lookup

PROMPT = list("abcdefgh")


def test_closing_closes_the_store_once(store: MemoryStore) -> None:
    engine = Engine(store)
    engine.pool.close()
    assert store.is_closed
    engine.prefixes.close()
    with pytest.raises(RuntimeError, match="is closed"):
        engine.prefixes.lookup(["a"])


def test_dropping_closes_the_store(store: MemoryStore) -> None:
    Engine(store)
    assert in_time(lambda: store.is_closed)


def test_an_unclosed_store_keeps_pages_it_may_write(
    store: MemoryStore, reader: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    hurry(monkeypatch)
    store.held = {"get"}
    reader.prefixes.lookup(list(map(key_of, PROMPT)))
    assert in_time(lambda: len(store.waiting) == 4)
    layout, other = PagedLayout([reader.tensor]), reader.pool.view_for(PagedLayout([reader.tensor]))
    with logged() as messages:
        reader.prefixes.close()
        for pool in (reader.pool, other):
            with pytest.raises(ValueError, match="the host pool has an open PrefixCache"):
                PrefixCache(layout, pool)
        reader.pool.close()
    assert "MemoryStore did not return from " in messages[0]
    assert len(messages) == 1
    store.release()  # reads into the pages, which are still mapped
    assert in_time(lambda: store.is_closed)


def test_an_unclosed_store_keeps_checksums_it_may_write(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a pool over other memory, which has them in memory of their own."""
    with Engine(store, verify="load") as writer:
        writer.share(PROMPT)
    reader, layout = MemoryStore(store.objects), PagedLayout([writer.tensor])
    memory = torch.zeros(len(PROMPT) * writer.pool.page_bytes, dtype=torch.uint8)
    pool = HostPool.over(memory, layout, verify="load")
    prefixes = PrefixCache(layout, pool, below=reader, below_model="m")
    reader.held = {"get"}
    prefixes.lookup(list(map(key_of, PROMPT)))
    assert in_time(lambda: len(reader.waiting) == 4)
    hurry(monkeypatch)
    pool.close()
    reader.release()
    assert in_time(lambda: reader.is_closed)
    assert memory.any(), "nothing has come"


def test_a_pool_outlives_its_closed_store(reader: Engine) -> None:
    assert reader.load(PROMPT) == len(PROMPT)
    reader.prefixes.close()
    PrefixCache(PagedLayout([reader.tensor]), reader.pool).close()


def test_a_cache_that_gets_no_threads_leaves_none(
    store: MemoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It closes the store that it has opened, and not its caller's."""
    before = set(threading.enumerate())
    layout = PagedLayout([torch.zeros(8, 16, dtype=torch.uint8)])
    pool = HostPool(layout, 4)
    start, closed = threading.Thread.start, list[FileStore]()
    monkeypatch.setattr(FileStore, "close", lambda opened: closed.append(opened))
    for count in range(8):
        for below in (store, tmp_path):
            rest = iter(range(count))

            def start_some(thread: threading.Thread, rest: Iterator[int] = rest) -> None:
                if next(rest, None) is None:
                    raise RuntimeError("can't start new thread")
                start(thread)

            with monkeypatch.context() as patch:
                patch.setattr(threading.Thread, "start", start_some)
                with pytest.raises(RuntimeError, match="can't start new thread"):
                    PrefixCache(layout, pool, below=below, below_model="m")
            assert in_time(lambda: set(threading.enumerate()) <= before)
        assert len(set(closed)) == len(closed) == count + 1
    assert not store.is_closed
    pool.close()


def test_a_store_that_no_tier_takes_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = PagedLayout([torch.zeros(8, 16, dtype=torch.uint8)])
    close = Mock()
    monkeypatch.setattr(FileStore, "close", close)
    monkeypatch.setattr(cache, "Tier", Mock(side_effect=MemoryError("no room")))
    with pytest.raises(MemoryError, match="no room"):
        PrefixCache(layout, HostPool(layout, 4), below=tmp_path, below_model="m")
    assert close.call_count == 1


def test_without_a_store_nothing_is_below() -> None:
    layout = PagedLayout([torch.zeros(8, 16, dtype=torch.uint8)])
    with PrefixCache(layout, HostPool(layout, 4)) as prefixes:
        assert prefixes.lookup(["a"]) == Lookup(0, 0, 0)
        with pytest.raises(RuntimeError, match="no second tier"):
            prefixes.below_stats()
        prefixes.poll()


def test_wrong_arguments_are_refused(tmp_path: Path) -> None:
    layout = PagedLayout([torch.zeros(8, 5000, dtype=torch.uint8)])
    own = HostPool(layout, 4)

    def refused(pool: HostPool = own, **options: Any) -> str:
        given = {"below": f"file:{tmp_path}", "below_model": "m", **options}
        return error_text(PrefixCache, layout, pool, **given)

    (tmp_path / "file").touch()
    texts = [
        refused(below="redis://:secret@there"),
        refused(below=1),
        refused(below_model=None),
        refused(below_model=("m", 1, 1)),
        refused(below_policy="none"),
        refused(below="/a/folder"),
        refused(below="folder"),
        refused(below="file:~/pages"),
        refused(below="file://host/pages"),
        refused(below_model=""),
        refused(below=None, below_policy="all"),
        refused(pool=HostPool(layout, 4, shared=True, part=(0, 2))),
    ]
    with pytest.raises(FileExistsError):
        PrefixCache(layout, own, below=f"file:{tmp_path}/file", below_model="m")
    assert_expected_inline(
        "\n\n".join(texts),
        """\
ValueError: below is a store of the kind 'redis'; pass 'file:PATH', 'valkey://HOST:PORT'
(for Redis too), 'mooncake://HOST:PORT', or an object of a class derived from
torch_kvswap.below.PageStore

TypeError: below is an int; pass 'file:PATH', 'valkey://HOST:PORT' (for Redis too),
'mooncake://HOST:PORT', or an object of a class derived from
torch_kvswap.below.PageStore

TypeError: below_model is None; name the model and its revision, because others may use
the same pages, or pass (name, rank, number of ranks)

ValueError: below_model[1] is 1; it must be 0

ValueError: below_policy is 'none'; it must be 'reused' or 'all'

ValueError: below is '/a/folder'; for a folder pass 'file:PATH' or a pathlib.Path

ValueError: below is 'folder'; for a folder pass 'file:PATH' or a pathlib.Path

ValueError: below is 'file:~/pages', but a PATH has neither ~ nor a host; pass
'file:/FOLDER'

ValueError: below is 'file://host/pages', but a PATH has neither ~ nor a host; pass
'file:/FOLDER'

ValueError: below_model is '', which has no name; name the model and its revision

ValueError: below_model and below_policy without below: name a store, such as
below='file:PATH', or leave out below_model and below_policy

ValueError: the pool has a part of each page for 2 ranks, but a second tier needs whole
pages; make the pool without part""",
    )
    with PrefixCache(layout, own, below=tmp_path, below_model="m"):
        pass  # nothing was left behind


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(__import__("sys").modules, "xxhash", None)
    assert_expected_inline(
        error_text(Engine, f"file:{tmp_path}"),
        """\
ImportError: a PrefixCache with `below` needs the package xxhash for the checksums of
pages: pip install xxhash""",
    )
    assert not os.listdir(tmp_path)
    with pytest.raises(ValueError, match="'valkye'"):  # the user's mistake first
        Engine("valkye://here")
