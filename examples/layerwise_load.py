"""Computes the first layers while the later ones still load.

    python examples/layerwise_load.py [--device cuda]

A request comes back from host memory. Its blocks land in four groups of layers; before each layer
the model's stream waits for that layer's group only, and the host waits for nothing.
"""

from __future__ import annotations

import argparse

import torch

import torch_kvswap as kvs

LAYERS, GROUPS, BLOCKS = 32, 4, 64
SHAPE = (2, 256, 16, 8, 128)  # keys and values, blocks, tokens, heads, head size


def attend(cache: torch.Tensor, blocks: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Attention of one token to the tokens of the blocks, as float32 [heads, head size]."""
    keys, values = cache[:, blocks].flatten(1, 2).float().transpose(1, 2)
    weights = torch.softmax(keys @ query[:, :, None] / query.shape[1] ** 0.5, dim=1)
    mixed: torch.Tensor = weights.transpose(1, 2) @ values
    return mixed[:, 0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    device = parser.parse_args().device
    caches = kvs.allocate_layers(SHAPE, num_layers=LAYERS, dtype=torch.bfloat16, device=device)
    for cache in caches:
        cache.normal_()
    gpu = kvs.PagedLayout(caches, block_dim=1)
    with kvs.OffloadHandler(gpu, kvs.HostPool(gpu, num_pages=BLOCKS)) as handler:
        query = torch.randn(8, 128, device=device)
        old = torch.arange(BLOCKS, device=device)
        want = [attend(cache, old, query) for cache in caches]
        pages = range(BLOCKS)
        handler.store(gpu_block_ids=range(BLOCKS), page_ids=pages).synchronize()

        new = old + BLOCKS  # the request has other blocks now
        load = handler.load(page_ids=pages, gpu_block_ids=new.tolist(), layer_groups=GROUPS)
        got = []
        for layer, cache in enumerate(caches):
            if layer * GROUPS % LAYERS == 0:  # the first layer of a group
                load.wait(layer_group=layer * GROUPS // LAYERS)
            got.append(attend(cache, new, query))
        load.synchronize()
        assert all(torch.equal(*pair) for pair in zip(want, got, strict=True))
    print(f"{LAYERS} layers of {BLOCKS} blocks: the same attention from the loaded blocks")


if __name__ == "__main__":
    main()
