"""The "cuda" devices of a PyTorch for ROCm, which torch_kvswap drives through PyTorch.

The fake accelerator stands in for AMD's GPUs: its type is CUDA, and so are its dispatch keys.
"""

from __future__ import annotations

import pytest
import torch
from error_text import one_line
from fake_accelerator import as_rocm
from logged import logged

from torch_kvswap import HostPool, OffloadHandler, PagedLayout, ops
from torch_kvswap.cli import doctor
from torch_kvswap.reference import ReferenceHandler

GPU = "cuda:0"


def cache(blocks: int = 8) -> tuple[torch.Tensor, PagedLayout]:
    """Random blocks of two layers on the device, and what they are."""
    values = torch.randint(256, (2, blocks, 4, 16), dtype=torch.uint8)
    tensors = [layer.to(GPU) for layer in values]
    return values, PagedLayout(tensors)


@as_rocm
def test_blocks_come_back_through_pytorchs_operations(accelerator):
    values, layout = cache()
    with HostPool(layout, 6) as pool, ReferenceHandler(layout, pool) as handler:
        assert pool.is_pinned
        stored = handler.store(gpu_block_ids=[3, 1, 6], page_ids=[0, 5, 2])
        stored.synchronize()
        for tensor in layout.tensors:
            tensor.zero_()
        loaded = handler.load(page_ids=[5, 0, 2], gpu_block_ids=[3, 1, 6])
        loaded.wait(torch.Stream(device=GPU))
        loaded.synchronize()
        methods = {result.copy_method for result in handler.poll()}
    assert methods == {"generic"}
    for before, after in zip(values, layout.tensors, strict=True):
        expected = torch.zeros_like(before)
        expected[[3, 1, 6]] = before[[1, 3, 6]]
        assert torch.equal(after.cpu(), expected)


@pytest.mark.parametrize("pair", [("cpu", GPU), (GPU, "cpu"), (GPU, GPU)])
@as_rocm
def test_the_ops_take_tensors_of_the_device(accelerator, pair):
    src, dst = torch.randn(6, 8).to(pair[0]), torch.zeros(5, 8).to(pair[1])
    ops.swap_blocks(src, dst, 32, torch.tensor([[5, 0], [2, 4]]))
    ops.swap_kv_blocks([src], [dst], torch.tensor([1]), torch.tensor([2]))
    assert torch.equal(dst.cpu()[[0, 4, 2]], src.cpu()[[5, 2, 1]])
    ids = torch.tensor([4, 1]).to(GPU)
    assert ops.expand_block_ids(ids, 3, skip_count=1).tolist() == [13, 14, 3, 4, 5]


@as_rocm
def test_what_needs_cuda_is_refused(accelerator):
    _, layout = cache()
    bf16 = PagedLayout([torch.zeros(4, 2, 64, dtype=torch.bfloat16).to(GPU)])
    one = torch.tensor([8])
    with HostPool(layout, 4) as pool:
        errors = [
            one_line(HostPool, bf16, 4, encoding="lossless"),
            one_line(OffloadHandler, layout, pool),
            one_line(ops.swap_blocks_batch, one, one, one),
        ]
    assert errors == [
        "ValueError: encoding='lossless' needs kernels of this library, which cuda:0 does not have; "
        "use encoding='raw'",
        "ValueError: the cache is on cuda:0, which only PyTorch drives; use "
        "torch_kvswap.reference.ReferenceHandler there (docs/devices.md)",
        "RuntimeError: torch_kvswap::swap_blocks_batch: the accelerator of this process is cuda, "
        "whose addresses only torch knows; use swap_blocks or swap_kv_blocks, which take tensors of "
        "any device",
    ]


@as_rocm
def test_nothing_is_said_of_cuda(accelerator):
    _, layout = cache()
    with logged() as messages, HostPool(layout, 4) as pool, ReferenceHandler(layout, pool):
        assert messages == []
    assert doctor.report()["PyTorch"].text.startswith(f"{torch.__version__} (HIP 7.2.0)")
