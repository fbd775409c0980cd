"""Two processes use one host pool: one stores blocks, the other loads them.

    python examples/shared_pool.py [--device cuda]

Ranks whose caches have the same contents, such as those of latent attention under tensor
parallelism, keep each block in host memory once.
"""

from __future__ import annotations

import argparse
import socket

import torch
import torch.multiprocessing as multiprocessing

import torch_kvswap as kvs
from torch_kvswap.host_pool import PoolHandle

SHAPE, LAYERS = (100, 16, 576), 4  # blocks, tokens, latent size


def make_cache(device: str, value: float) -> tuple[list[torch.Tensor], kvs.PagedLayout]:
    tensors = [torch.full(SHAPE, value, dtype=torch.bfloat16, device=device) for _ in range(LAYERS)]
    return tensors, kvs.PagedLayout(tensors)


def load(device: str, connection: socket.socket) -> None:
    """The other process: attaches to the pool, and loads what the first one has stored."""
    tensors, gpu = make_cache(device, 0.0)
    handle = PoolHandle.receive(connection)
    with kvs.OffloadHandler(gpu, kvs.HostPool.attach(gpu, handle)) as handler:
        handler.load(page_ids=[0, 1], gpu_block_ids=[8, 9]).synchronize()
    assert all((tensor[8:10] == 1.0).all() for tensor in tensors)
    assert not any(tensor[:8].any() or tensor[10:].any() for tensor in tensors)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    device = parser.parse_args().device
    here, there = socket.socketpair()
    # A new process, not a fork: CUDA, handlers and pools cannot be used in a forked child.
    other = multiprocessing.get_context("spawn").Process(
        target=load, args=(device, there), daemon=True
    )
    other.start()
    _, gpu = make_cache(device, 1.0)
    with kvs.HostPool(gpu, num_pages=100, shared=True) as pool:
        with kvs.OffloadHandler(gpu, pool) as handler:
            handler.store(gpu_block_ids=[5, 6], page_ids=[0, 1]).synchronize()
        handle = pool.share()
        handle.send(here)  # the store has ended, so the other process may load
        handle.close()
        other.join()
    if other.exitcode:
        raise SystemExit("the other process failed")
    print("the other process has loaded both blocks")


if __name__ == "__main__":
    main()
