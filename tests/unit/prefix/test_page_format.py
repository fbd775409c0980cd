"""However a cache is opened, blocks are served only to caches in which their bytes mean the same."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from below_engine import Engine, cache_at, find, key_of
from logged import logged
from memory_store import MemoryStore
from patience import in_time
from served_engine import serving
from torch import Tensor

from torch_kvswap import HostPool, PagedLayout, PrefixCache
from torch_kvswap.prefix import BlockGroup

KEYS = [[key_of(name) for name in "abcd"]]
GROUP = BlockGroup(16, block_tokens=16)
Cache = tuple[PagedLayout, BlockGroup]
Opener = Callable[[PagedLayout, BlockGroup], PrefixCache]


def first_cache() -> Cache:
    """Keys and values of 16 tokens and 8 heads."""
    return of_tensors(lambda: torch.zeros(8, 16, 8, 4))


def same_cache() -> Cache:
    return of_tensors(lambda: torch.zeros(9, 3, 16, 8, 4)[:, 1])


def of_tensors(make: Callable[[], Tensor], names: str = "kv") -> Cache:
    return PagedLayout({name: make() for name in names}), GROUP


def of_shape(*shape: int, **options: Any) -> Callable[[], Cache]:
    return lambda: of_tensors(lambda: torch.zeros(shape, **options))


def of_group(**fields: Any) -> Callable[[], Cache]:
    return lambda: (first_cache()[0], replace(GROUP, **fields))


# All have blocks of as many bytes, and pages of the same keys.
OTHERS: dict[str, Callable[[], Cache]] = {
    "heads first": of_shape(8, 8, 16, 4),
    "heads first in memory": lambda: of_tensors(lambda: torch.zeros(8, 8, 16, 4).transpose(1, 2)),
    "more heads": of_shape(8, 16, 16, 2),
    "another type": of_shape(8, 16, 8, 4, dtype=torch.int32),
    "values first": lambda: of_tensors(lambda: torch.zeros(8, 16, 8, 4), "vk"),
    "without names": lambda: (PagedLayout(list(first_cache()[0].tensors)), GROUP),
    "keys beside values": lambda: (PagedLayout([torch.zeros(8, 2, 16, 8, 4)]), GROUP),
    "one tensor": lambda: (PagedLayout([torch.zeros(2, 8, 16, 8, 4)], 1), GROUP),
    "other tokens": of_group(block_tokens=32),
    "a window": of_group(window_tokens=64),
    "a state": of_group(is_state=True),
}


def below(store: Any) -> Opener:
    def open_cache(layout: PagedLayout, group: BlockGroup) -> PrefixCache:
        pool = HostPool(layout, group.num_pages)
        how = {"below_model": "m", "below_policy": "all"}
        return PrefixCache([layout], [pool], [group], below=store(), **how)  # type: ignore[arg-type]

    return open_cache


@contextmanager
def by_folder(path: str) -> Iterator[Opener]:
    yield below(lambda: f"file:{path}")


@contextmanager
def by_store(_: str) -> Iterator[Opener]:
    objects: dict[str, bytes] = {}
    yield below(lambda: MemoryStore(objects))


@contextmanager
def by_server(path: str) -> Iterator[Opener]:
    with serving(path):
        yield lambda layout, group: PrefixCache.connect(path, [layout], [group], model="m")


def store_blocks(cache: PrefixCache) -> None:
    (layout,) = cache.layouts
    for tensor in layout.tensors:
        tensor[:4] = torch.randn(4, *tensor.shape[1:])
    job = cache.store(KEYS, [[0, 1, 2, 3]]).job
    assert job is not None
    job.synchronize()
    cache.poll()
    if cache._below is not None:
        assert in_time(lambda: cache.below_stats().written == 4)


@pytest.mark.parametrize("way", [by_folder, by_store, by_server])
@pytest.mark.parametrize("other", OTHERS)
def test_blocks_of_another_format_are_not_served(way: Any, other: str, path: str) -> None:
    with way(path) as open_cache:
        first = open_cache(*first_cache())
        store_blocks(first)
        if way is by_server:
            with pytest.raises(ValueError, match="the server has other pages: pages"):
                open_cache(*OTHERS[other]())
        else:
            with open_cache(*OTHERS[other]()) as cache:
                assert find(cache, KEYS).found == 0
        with open_cache(*same_cache()) as cache:
            assert find(cache, KEYS).ready == 4
            job = cache.load(KEYS, [[5, 6, 7, 8]])
            assert job is not None
            job.synchronize()
            for here, there in zip(cache.layouts[0].tensors, first.layouts[0].tensors, strict=True):
                assert torch.equal(here[5:9], there[:4])
        first.close()


def test_a_folder_describes_its_pages(tmp_path: Path) -> None:
    with Engine(f"file:{tmp_path}") as engine:
        engine.share("ab")
        (form,) = engine.tier._formats
    (file,) = (tmp_path / "formats").iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    assert json.loads(file.read_text()) == form.description
    assert '  "uint8 [blocks, 5000]"' in file.read_text().splitlines()
    assert {page.name.split("@")[0] for page in tmp_path.glob("*@0@*")} == {form.namespace.hex()}


def test_an_engine_says_why_a_folder_has_nothing(tmp_path: Path) -> None:
    def new(layout: PagedLayout) -> PrefixCache:
        return cache_at(tmp_path, layout, HostPool(layout, 4))

    with logged() as messages, new(first_cache()[0]), new(same_cache()[0]):
        assert messages == []
        with new(OTHERS["heads first"]()[0]):
            (message,) = messages
        with Engine(f"file:{tmp_path}", below_model="another"):
            assert len(messages) == 1
    assert (
        "has pages of m that this engine cannot use: tensors[0]: k: float32 [blocks, 8, 16, 4] here, "
        "k: float32 [blocks, 16, 8, 4] there;"
    ) in message


@pytest.mark.parametrize("what", ["", "[]", "{", '{"model": "m"}', os.mkfifo, os.mkdir])
def test_what_is_no_description_harms_nobody(what: Any, tmp_path: Path) -> None:
    formats = tmp_path / "formats"
    formats.mkdir()
    if callable(what):
        what(formats / "x")
    else:
        (formats / "x").write_text(what)
    with logged() as messages, Engine(f"file:{tmp_path}") as engine:
        engine.share("ab")
    assert messages == []


def test_a_folder_without_descriptions_has_pages(tmp_path: Path) -> None:
    (tmp_path / "formats").symlink_to(tmp_path / "elsewhere")
    with Engine(f"file:{tmp_path}") as engine:
        engine.share("ab")
        assert engine.load("ab") == 2


def test_descriptions_that_cannot_be_used_are_told(tmp_path: Path) -> None:
    formats = tmp_path / "formats"
    formats.mkdir()
    formats.chmod(0o777)  # others may write there
    with logged() as messages, Engine(f"file:{tmp_path}"):
        pass
    assert [message.partition(":")[0] for message in messages] == [
        f"cannot tell whether {tmp_path} has pages of another format"
    ]
