"""However a cache is opened, blocks are served only to caches in which their bytes mean the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from below_engine import find, key_of
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


def test_logs_of_two_engines_can_be_compared(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "torch_kvswap")
    texts = []
    for made in (first_cache(), same_cache(), OTHERS["heads first"]()):
        caplog.clear()
        with below(lambda: f"file:{tmp_path}")(*made) as cache:
            store_blocks(cache)
        (text,) = (text for text in caplog.messages if text.startswith("pages in the second tier"))
        texts.append(text.splitlines())
    first, same, other = texts
    assert first == same
    assert ' "model": "m",' in first
    assert [lines for lines in zip(first[1:], other[1:], strict=True) if lines[0] != lines[1]] == [
        ('  "k: float32 [blocks, 16, 8, 4]",', '  "k: float32 [blocks, 8, 16, 4]",'),
        ('  "v: float32 [blocks, 16, 8, 4]"', '  "v: float32 [blocks, 8, 16, 4]"'),
    ]
    named = {text[0].split(" are named ")[1].split("@...")[0] for text in (first, other)}
    assert {file.name.rpartition("@")[0] for file in tmp_path.glob("*@*")} == named
