"""swap_blocks_batch: bytes, streams and lifetimes. tests/sim/test_batch.py tests its driver
calls.
"""

import mmap

import numpy as np
import pytest
import torch
from device_pairs import PAIRS, place
from error_text import message_of
from expecttest import assert_expected_inline
from gpu_cache import Hold, keep_busy

from torch_kvswap import ops

GPU = pytest.mark.gpu
SENTINEL = 0xA5


def buffer(num_bytes, where, fill):
    tensor = torch.full((num_bytes,), SENTINEL, dtype=torch.uint8)
    if fill:
        tensor.random_(0, 256)
    return place(tensor, where)


def cut(total, n, generator):
    """n disjoint ranges of [0, total) as offsets and sizes, in random order, some of size 0."""
    ends = torch.randint(0, total, (2 * n,), generator=generator).sort().values
    order = torch.randperm(n, generator=generator)
    return ends[::2][order], (ends[1::2] - ends[::2])[order]


def swap(src, src_offsets, dst, dst_offsets, sizes, any_order=False):
    ops.swap_blocks_batch(
        src.data_ptr() + src_offsets, dst.data_ptr() + dst_offsets, sizes, any_order
    )


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("any_order", [False, True])
def test_random_fragments_move_just_their_bytes(pair, any_order):
    generator = torch.Generator().manual_seed(7)
    for n in (0, 1, 2, 50, 1000):
        dst_offsets, sizes = cut(100_000, n, generator)
        src_offsets = torch.randint(0, 100_000, (n,), generator=generator)
        src = buffer(200_000, pair[0], fill=True)
        dst = buffer(100_000, pair[1], fill=False)
        expected, source = dst.cpu().clone(), src.cpu()
        for s, d, size in zip(
            src_offsets.tolist(), dst_offsets.tolist(), sizes.tolist(), strict=True
        ):
            expected[d : d + size] = source[s : s + size]
        if "cuda" in pair:
            torch.cuda.synchronize()
        swap(src, src_offsets, dst, dst_offsets, sizes, any_order)
        if "cuda" in pair:
            torch.cuda.synchronize()
        assert torch.equal(dst.cpu(), expected)


@pytest.mark.parametrize("pair", PAIRS)
def test_a_hundred_thousand_fragments_arrive(pair):
    n, size = 100_000, 80
    src, dst = buffer(n * size, pair[0], True), buffer(n * size * 2, pair[1], False)
    to = torch.randperm(2 * n)[:n]
    swap(src, torch.arange(n) * size, dst, to * size, torch.full((n,), size))
    if "cuda" in pair:
        torch.cuda.synchronize()
    expected = torch.full((2 * n, size), SENTINEL, dtype=torch.uint8)
    expected[to] = src.cpu().view(n, size)
    assert torch.equal(dst.cpu().view(2 * n, size), expected)


def test_wrong_arguments_are_named():
    ptrs, sizes = torch.zeros(2, dtype=torch.int64) + 64, torch.tensor([0, 0])
    calls = [
        lambda: ops.swap_blocks_batch(ptrs, ptrs, torch.tensor([0, -5])),
        lambda: ops.swap_blocks_batch(torch.tensor([64, 0]), ptrs, torch.tensor([0, 8])),
        lambda: ops.swap_blocks_batch(ptrs, torch.tensor([64, 0]), torch.tensor([0, 8])),
        lambda: ops.swap_blocks_batch(ptrs.int(), ptrs, sizes),
        lambda: ops.swap_blocks_batch(ptrs, ptrs.double(), sizes),
        lambda: ops.swap_blocks_batch(ptrs, ptrs[:1], sizes),
        lambda: ops.swap_blocks_batch(ptrs, ptrs, sizes[:, None]),
        lambda: ops.swap_blocks_batch(ptrs, ptrs, torch.zeros(4, dtype=torch.int64)[::2]),
    ]
    assert_expected_inline(
        "\n".join(message_of(call) for call in calls),
        """\
torch_kvswap::swap_blocks_batch: sizes[1] is -5; expected 0 or more bytes
torch_kvswap::swap_blocks_batch: src_ptrs[1] is null, with a size of 8; expected an address
torch_kvswap::swap_blocks_batch: dst_ptrs[1] is null, with a size of 8; expected an address
torch_kvswap::swap_blocks_batch: src_ptrs has dtype Int; expected Long (torch.int64)
torch_kvswap::swap_blocks_batch: dst_ptrs has dtype Double; expected Long (torch.int64)
torch_kvswap::swap_blocks_batch: dst_ptrs has length 1, but src_ptrs has 2; expected the same number
torch_kvswap::swap_blocks_batch: sizes has shape [2, 1]; expected one dimension
torch_kvswap::swap_blocks_batch: sizes has stride 2; expected a contiguous tensor, call .contiguous()""",
    )


def test_checked_addresses_name_the_missing_range(monkeypatch):
    monkeypatch.setenv("KVSWAP_CHECK_ADDRESSES", "1")
    good = torch.zeros(64, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match=r"src_ptrs\[0\] is 0x1000 .* can be read"):
        ops.swap_blocks_batch(
            torch.tensor([4096]), torch.tensor([good.data_ptr()]), torch.tensor([8])
        )
    page = np.frombuffer(mmap.mmap(-1, 4096, prot=mmap.PROT_READ), dtype=np.uint8)
    with pytest.raises(RuntimeError, match=r"dst_ptrs\[0\] .* first 0 .* can be written"):
        ops.swap_blocks_batch(
            torch.tensor([good.data_ptr()]), torch.tensor([page.ctypes.data]), torch.tensor([4])
        )


def test_checked_addresses_refuse_overlap(monkeypatch):
    monkeypatch.setenv("KVSWAP_CHECK_ADDRESSES", "1")
    data = torch.zeros(64, dtype=torch.uint8)
    offsets, sizes = torch.tensor([0, 8]), torch.tensor([8, 8])
    swap(data, offsets, data, offsets + 16, sizes)
    with pytest.raises(RuntimeError, match="are written at index 1 and written at index 0"):
        swap(data, offsets, data, torch.tensor([32, 36]), sizes)
    with pytest.raises(RuntimeError, match="are written at index 1 and read at index 0"):
        swap(data, offsets, data, torch.tensor([32, 4]), sizes)


@GPU
@pytest.mark.parametrize("n", [1, 64])
@pytest.mark.parametrize("stream", ["default", "per-thread", "side"])
def test_every_stream_kind_orders_copies_after_work(stream, n):
    # PyTorch's default stream is the legacy one, under its null handle.
    current = {
        "default": torch.cuda.default_stream,
        "per-thread": lambda: torch.cuda.ExternalStream(2),
        "side": torch.cuda.Stream,
    }[stream]()
    size = (1 << 22) // n
    src, dst = buffer(2 << 22, "cuda", True), buffer(1 << 22, "pinned", False)
    torch.cuda.synchronize()
    with torch.cuda.stream(current):
        keep_busy(100)
        src.fill_(1)
        offsets = torch.arange(n) * size
        swap(src, 2 * offsets, dst, offsets, torch.full((n,), size))
        src.fill_(2)
    current.synchronize()
    assert bool((dst == 1).all())


@GPU
def test_another_current_device_stays_current():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    src = torch.zeros(1 << 22, dtype=torch.uint8, device="cuda:1")
    dst = buffer(1 << 22, "pinned", False)
    zero, size = torch.tensor([0]), torch.tensor([1 << 22])
    side = torch.cuda.Stream(device=1)
    with torch.cuda.device(1), torch.cuda.stream(side):
        keep_busy()
        src.fill_(3)
        with torch.cuda.device(0):
            swap(src, zero, dst, zero, size)
            assert torch.cuda.current_device() == 0
    side.synchronize()
    assert bool((dst == 3).all())


@GPU
@pytest.mark.parametrize("n", [1, 16])
def test_a_pageable_source_may_change_after_return(n):
    src, dst = buffer(n << 20, "cpu", True), buffer(n << 20, "cuda", False)
    expected = src.clone()
    offsets = torch.randperm(n) * (1 << 20)
    torch.cuda.synchronize()
    keep_busy(100)
    swap(src, offsets, dst, offsets, torch.full((n,), 1 << 20))
    src.fill_(0)
    torch.cuda.synchronize()
    assert torch.equal(dst.cpu(), expected)


@GPU
def test_a_captured_batch_copies_on_each_replay():
    n, size = 32, 512
    src, dst = buffer(n * size, "pinned", True), buffer(n * size, "cuda", False)
    offsets = torch.randperm(n) * size
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        swap(src, offsets, dst, offsets, torch.full((n,), size))
    for _ in range(2):
        src.random_(0, 256)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(dst.cpu(), src)


@GPU
def test_ranges_outside_of_the_allocations_are_found(monkeypatch):
    monkeypatch.setenv("KVSWAP_CHECK_ADDRESSES", "1")
    src, dst = buffer(1 << 20, "cuda", True), buffer(1 << 20, "pinned", False)
    zero = torch.tensor([0])
    swap(src, zero, dst, zero, torch.tensor([1 << 20]))
    torch.cuda.synchronize()
    assert torch.equal(dst, src.cpu())
    with pytest.raises(RuntimeError, match=r"dst_ptrs\[0\] is .*pinned host memory"):
        swap(buffer(1 << 30, "cuda", False), zero, dst, zero, torch.tensor([1 << 30]))
    with pytest.raises(RuntimeError, match=r"src_ptrs\[0\] is .*device 0"):
        swap(src, zero, dst, zero, torch.tensor([1 << 40]))


@GPU
def test_several_mappings_pass_the_address_check(monkeypatch):
    # With expandable segments this tensor is made of many mappings; without, of one allocation.
    monkeypatch.setenv("KVSWAP_CHECK_ADDRESSES", "1")
    num_bytes = 300 << 20
    src, dst = buffer(num_bytes, "cuda", True), buffer(num_bytes, "pinned", False)
    offsets = torch.tensor([0, 100 << 20, 200 << 20])
    sizes = torch.full((3,), 100 << 20)
    torch.cuda.synchronize()
    swap(src, offsets, dst, offsets, sizes)
    torch.cuda.synchronize()
    assert torch.equal(dst, src.cpu())
    monkeypatch.delenv("KVSWAP_CHECK_ADDRESSES")
    dst.zero_()
    swap(src, offsets, dst, offsets, sizes)
    torch.cuda.synchronize()
    assert torch.equal(dst, src.cpu())


@GPU
@pytest.mark.parametrize("leading", [0, 1, 5])
def test_a_driver_error_names_the_fragment(leading):
    src, dst = buffer(1 << 20, "cuda", True), buffer(1 << 20, "pinned", False)
    offsets = torch.arange(leading + 1) * 4096
    sizes = torch.full((leading + 1,), 64)
    sizes[leading] = 1 << 40
    pattern = (
        rf"failed at index {leading}, from 0x\w+ \(device 0, allocation .*\)"
        r" to 0x\w+ \(pinned host memory, allocation .*\), 1099511627776 bytes: CUDA_ERROR_"
    )
    with pytest.raises(RuntimeError, match=pattern):
        swap(src, offsets, dst, offsets, sizes)
    sizes[leading] = 64
    swap(src, offsets, dst, offsets, sizes)
    torch.cuda.synchronize()
    assert torch.equal(dst[offsets[leading] :][:64], src[offsets[leading] :][:64].cpu())


@GPU
def test_a_mixed_batch_goes_to_the_stream():
    gpu, pinned = buffer(4096, "cuda", True), buffer(4096, "pinned", True)
    out = buffer(8192, "pinned", False)
    src = torch.tensor([gpu.data_ptr(), pinned.data_ptr()])
    dst = torch.tensor([out.data_ptr(), out.data_ptr() + 4096])
    torch.cuda.synchronize()
    with Hold():
        gpu.fill_(1)
        ops.swap_blocks_batch(src, dst, torch.tensor([4096, 4096]))
        assert set(out.tolist()) == {SENTINEL}
    torch.cuda.synchronize()
    assert bool((out[:4096] == 1).all())
    assert torch.equal(out[4096:], pinned)
