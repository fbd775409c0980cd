"""PyTorch's default device, which engines change, decides nothing here."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses import FakeTensorMode

import torch_kvswap as kvs
from torch_kvswap.reference import ReferenceHandler


@pytest.mark.parametrize("encoding", ["raw", "lossless"])
def test_blocks_come_back_under_another_default_device(encoding: str) -> None:
    tensors = [
        (1 + torch.rand(8, 2048)).bfloat16() for _ in range(2)
    ]  # of few exponents, so they fit
    before = [tensor[1:3].clone() for tensor in tensors]
    hasher = kvs.PrefixHasher("model", "bfloat16", block_tokens=16)
    with torch.device("meta"):
        gpu = kvs.PagedLayout(tensors)
        pool = kvs.HostPool(gpu, 8, encoding=encoding)
        with kvs.PrefixCache(gpu, pool) as prefixes:
            keys = hasher.keys(range(32))
            prefixes.store(keys, [1, 2])
            prefixes.synchronize()
            prefixes.poll()
            prefixes.load(keys, [5, 6], prefix=2).synchronize()
        with kvs.OffloadHandler(gpu, pool) as handler:
            handler.store(gpu_block_ids=[5, 6], page_ids=[0, 7]).synchronize()
            handler.load(page_ids=[7], gpu_block_ids=[3]).synchronize()
        blocks = [pool.read_block(page) for page in (0, 7)]
    for tensor, want in zip(tensors, before, strict=True):
        assert torch.equal(tensor[5:7], want)
        assert torch.equal(tensor[3], want[1])
    for place, block in enumerate(blocks):
        assert torch.equal(block.view(torch.bfloat16), torch.cat([want[place] for want in before]))


def test_fake_tensors_give_native_code_no_address() -> None:
    gpu = kvs.PagedLayout([torch.randn(8, 2048).bfloat16()])
    pool = kvs.HostPool(gpu, 8, encoding="lossless")
    with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(RuntimeError, match="outside"):
        pool.read_block(0)


def test_ops_ignore_the_default_device() -> None:
    source, ids = torch.arange(32.0).view(8, 4), torch.tensor([3, 5])
    target, on_host = torch.zeros(8, 4), torch.zeros(8, 4)
    gpu = kvs.PagedLayout([source])
    with torch.device("meta"):
        kvs.swap_kv_blocks([source], [on_host], ids, ids)
        kvs.swap_blocks(source, target, 16, kvs.expand_block_ids(ids, 1)[:, None].expand(2, 2))
        with ReferenceHandler(gpu, kvs.HostPool(gpu, 2)) as handler:
            handler.store(gpu_block_ids=[3, 5], page_ids=[0, 1]).synchronize()
            handler.load(page_ids=[0, 1], gpu_block_ids=[0, 1]).synchronize()
    for blocks in (target[ids], on_host[ids], source[:2]):
        assert torch.equal(blocks, source[ids])
