"""Stores and finds a prompt of a hybrid model: each group of layers keeps what it needs.

    python examples/hybrid_model.py [--device cuda]

Two layers have full attention, four a sliding window, three a state (Mamba). Of a prefix a hit
needs all blocks of the first group, those in the window of the second, and one state.
"""

from __future__ import annotations

import argparse

import torch

import torch_kvswap as kvs
from torch_kvswap.prefix import BlockGroup

HEADS, SIZE = 8, 128
GROUPS = [
    BlockGroup(num_pages=100, block_tokens=16),
    BlockGroup(num_pages=50, block_tokens=32, window_tokens=64),
    BlockGroup(num_pages=25, block_tokens=64, is_state=True),  # the state after each 64 tokens
]


def make_layers(count: int, shape: tuple[int, ...], device: str) -> list[torch.Tensor]:
    """Layers with blocks in dimension 1. Each block has its number as its values."""
    numbers = torch.arange(shape[1], device=device).view(1, -1, *[1] * (len(shape) - 2))
    return [numbers.expand(shape).to(torch.bfloat16) for _ in range(count)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    device = parser.parse_args().device
    # Keys and values, blocks, tokens, heads, head size.
    full = make_layers(2, (2, 60, 16, HEADS, SIZE), device)
    window = make_layers(4, (2, 40, 32, HEADS, SIZE), device)
    state = make_layers(3, (1, 30, 4096), device)
    layouts = [kvs.PagedLayout(layers, block_dim=1) for layers in (full, window, state)]
    pools = [
        kvs.HostPool(layout, group.num_pages) for layout, group in zip(layouts, GROUPS, strict=True)
    ]
    hashers = [  # keys of different groups must differ
        kvs.PrefixHasher("my-model", "bfloat16", group.block_tokens, group=number)
        for number, group in enumerate(GROUPS)
    ]
    with kvs.PrefixCache(layouts, pools, GROUPS) as prefixes:
        prompt = list(range(200))
        computed = [range(12), range(6), range(3)]  # blocks of 16, 32 and 64 tokens: 192 tokens
        store = prefixes.store([hasher.keys(prompt) for hasher in hashers], computed)
        assert store.job is not None
        store.job.synchronize()
        prefixes.poll()

        keys = [hasher.lookup_keys(prompt) for hasher in hashers]
        found = prefixes.lookup(keys).ready  # in units of 64 tokens, where blocks of all groups end
        assert found * prefixes.unit_tokens == 192
        needed = prefixes.needed_blocks(found)
        assert needed == [range(12), range(4, 6), range(2, 3)]
        # Blocks that are not needed have no GPU block: -1.
        blocks = [[*range(30, 42)], [-1, -1, -1, -1, 20, 21], [-1, -1, 10]]
        load = prefixes.load(keys, blocks, prefix=found)
        assert load is not None
        load.wait()

        assert all(layer[0, 30:42, 0, 0, 0].tolist() == [*range(12)] for layer in full)
        assert all(layer[0, 20:22, 0, 0, 0].tolist() == [4, 5] for layer in window)
        assert all(layer[0, 10, 0] == 2 for layer in state)
        assert [int(layer[0, 22, 0]) for layer in state] == [22] * 3  # nothing else was written
        loaded = sum(of.block_bytes * len(its) for of, its in zip(layouts, needed, strict=True))
        load.synchronize()
        assert prefixes.poll()[0].nbytes == loaded
    print(f"a prefix of 192 tokens was loaded: {[len(its) for its in needed]} blocks of the groups")


if __name__ == "__main__":
    main()
