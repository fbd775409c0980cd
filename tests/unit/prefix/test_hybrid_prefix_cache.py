"""A prefix cache serves a hybrid model whose GPU blocks are reused as soon as a request has ended."""

from __future__ import annotations

import random

import pytest
import torch

from torch_kvswap import HostPool, PagedLayout, PrefixCache
from torch_kvswap.prefix import BlockGroup

GPU_BLOCKS = 24
Prefix = tuple[int, ...]


class Server:
    """Computes blocks of one token, in a group with full attention and one with a window of 3.

    Args:
        seed (int): of the requests and of the GPU blocks that they get.
        marks (bool): whether blocks that are not on the GPU are marked by -1.
    """

    def __init__(self, seed: int, marks: bool) -> None:
        self._random = random.Random(seed)
        self._marks = marks
        self._contents: dict[tuple[int, Prefix], float] = {}
        layouts = [PagedLayout([torch.zeros(GPU_BLOCKS, 4)]) for _ in range(2)]
        self._caches = [layout.tensors[0] for layout in layouts]
        pools = [HostPool(layouts[0], 9), HostPool(layouts[1], 6)]
        groups = [BlockGroup(9), BlockGroup(6, window_tokens=3)]
        self.prefixes = PrefixCache(layouts, pools, groups)

    def serve(self) -> bool:
        """Serves a random request. Returns whether all loaded blocks had the right contents."""
        tokens = tuple(self._random.choices((0, 1), (3, 1), k=self._random.randint(2, 8)))
        keys = [[(group, *tokens[: end + 1]) for end in range(len(tokens))] for group in range(2)]
        found = self.prefixes.lookup([of_group[:-1] for of_group in keys]).ready
        needed = self.prefixes.needed_blocks(found)
        tables = [self._random.sample(range(GPU_BLOCKS), len(tokens)) for _ in range(2)]
        if self._marks:
            for table, of_group in zip(tables, needed, strict=True):
                table[: of_group.start] = [-1] * of_group.start
        right = True
        if found:
            loaded = [of_group[:found] for of_group in keys]
            ids = [table[:found] for table in tables]
            assert self.prefixes.load(loaded, ids, prefix=found) is not None
            right = all(
                self._caches[group][tables[group][at], 0] == self._contents[group, tokens[: at + 1]]
                for group in range(2)
                for at in needed[group]
            )
        for group in range(2):
            for at in range(found, len(tokens)):
                content = self._contents.setdefault(
                    (group, tokens[: at + 1]), float(len(self._contents) + 1)
                )
                self._caches[group][tables[group][at]] = content
        self.prefixes.store(keys, tables)
        self.prefixes.poll()
        return right


@pytest.mark.parametrize("seed", range(8))
def test_blocks_left_out_are_not_stored(seed: int) -> None:
    server = Server(seed, marks=True)
    with server.prefixes:
        assert all(server.serve() for _ in range(150))


def test_control_unmarked_blocks_left_out_spoil_the_cache() -> None:
    right = []
    for seed in range(8):
        server = Server(seed, marks=False)
        with server.prefixes:
            right += [server.serve() for _ in range(150)]
    assert not all(right)
