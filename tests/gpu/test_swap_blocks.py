"""swap_blocks and swap_kv_blocks: bytes against plain PyTorch, and the errors for invalid
arguments.
"""

import threading

import pytest
import torch
from device_pairs import PAIRS, place
from error_text import message_of
from expecttest import assert_expected_inline
from gpu_cache import keep_busy

from torch_kvswap import ops

GPU = pytest.mark.gpu
DTYPES = [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.uint8, torch.float64]
SENTINEL = 0xA5


def block_cache(num_blocks, block_bytes, padding, where, fill):
    """A uint8 tensor [num_blocks, block_bytes] whose blocks lie `padding` bytes apart, and what backs it."""
    backing = torch.full((num_blocks * (block_bytes + padding) + 64,), SENTINEL, dtype=torch.uint8)
    if fill:
        backing.random_(0, 256)
    backing = place(backing, where)
    stride = (block_bytes + padding, 1)
    return backing.as_strided((num_blocks, block_bytes), stride, 32), backing


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("block_bytes", [1, 31, 656, 4096])
def test_random_mappings_move_just_the_mapped_bytes(pair, block_bytes):
    generator = torch.Generator().manual_seed(block_bytes)
    for padding in (0, 17):
        for _ in range(10):
            num_src, num_dst = torch.randint(1, 60, (2,), generator=generator).tolist()
            n = int(torch.randint(0, num_dst + 1, (), generator=generator))
            src, _ = block_cache(num_src, block_bytes, padding, pair[0], fill=True)
            dst, backing = block_cache(num_dst, block_bytes, 40 - padding, pair[1], fill=False)
            mapping = torch.stack(
                [
                    torch.randint(0, num_src, (n,), generator=generator),
                    torch.randperm(num_dst, generator=generator)[:n],
                ],
                dim=1,
            )
            expected = backing.cpu().clone()
            view = expected.as_strided(dst.shape, dst.stride(), 32)
            view[mapping[:, 1]] = src.cpu()[mapping[:, 0]]
            ops.swap_blocks(src, dst, block_bytes, mapping)
            assert torch.equal(backing.cpu(), expected)


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_moves_as_bytes(pair, dtype):
    bits = torch.randint(0, 256, (12, 3, 8 * dtype.itemsize), dtype=torch.uint8)
    src = place(bits.view(dtype), pair[0])
    dst = place(torch.zeros_like(bits).view(dtype), pair[1])
    ops.swap_blocks(src, dst, 24 * dtype.itemsize, torch.tensor([[2, 0], [11, 1]]))
    got = dst.cpu().view(torch.uint8)
    assert torch.equal(got[:2], bits[[2, 11]])
    assert not got[2:].any()


@pytest.mark.parametrize("pair", PAIRS)
def test_a_mapping_with_any_strides_is_read_right(pair):
    src, _ = block_cache(30, 64, 0, pair[0], fill=True)
    pairs = torch.tensor([[4, 9], [8, 2], [29, 0]])
    for mapping in (pairs.t().contiguous().t(), torch.stack([pairs, pairs], 2)[:, :, 1]):
        assert not mapping.is_contiguous()
        dst, _ = block_cache(10, 64, 0, pair[1], fill=False)
        ops.swap_blocks(src, dst, 64, mapping)
        assert torch.equal(dst.cpu()[pairs[:, 1]], src.cpu()[pairs[:, 0]])


def test_permuted_blocks_keep_their_elements():
    src = torch.randn(6, 4, 8).transpose(1, 2)
    dst = torch.zeros(6, 4, 8).transpose(1, 2)
    ops.swap_blocks(src, dst, 128, torch.tensor([[1, 2]]))
    assert torch.equal(dst[2], src[1])


def test_a_dimension_of_size_one_has_no_order():
    src, dst = torch.randn(4, 8, 1).transpose(1, 2), torch.zeros(4, 1, 8)
    assert src.stride() != dst.stride()
    ops.swap_blocks(src, dst, 32, torch.tensor([[1, 2]]))
    assert torch.equal(dst[2], src[1])


def test_a_tensor_without_blocks_has_no_block_size():
    none, some = torch.zeros(0, 8), torch.ones(4, 8)
    no_ids = torch.zeros(0, 2, dtype=torch.int64)
    for src, dst in ((none, some), (some, none), (none, none)):
        ops.swap_blocks(src, dst, 32, no_ids)
        ops.swap_kv_blocks([src], [dst], no_ids[:, 0], no_ids[:, 1])
    assert some.eq(1).all()


def test_blocks_that_overlap_are_seen_at_any_distances():
    memory = torch.arange(16, dtype=torch.uint8)
    src, dst = memory.as_strided((4, 1), (4, 1)), memory.as_strided((3, 1), (3, 1), 1)
    with pytest.raises(RuntimeError, match=r"block 1 of src\[0\], .* block 1 of dst\[0\]"):
        ops.swap_kv_blocks([src], [dst], torch.tensor([1]), torch.tensor([1]))
    assert memory.tolist() == list(range(16))
    ops.swap_kv_blocks([src], [dst], torch.tensor([3]), torch.tensor([0]))
    assert memory[1] == 12


def test_blocks_of_one_cache_move_within_it():
    cache = torch.randn(10, 32)
    before = cache.clone()
    ops.swap_blocks(cache, cache, 128, torch.tensor([[0, 9], [1, 8]]))
    assert torch.equal(cache[[9, 8]], before[[0, 1]])
    assert torch.equal(cache[:8], before[:8])


@pytest.mark.parametrize("pair", PAIRS)
def test_swap_kv_blocks_moves_layers_of_different_shapes(pair):
    shapes = [(20, 2, 16), (20, 48), (20, 1, 7, 3)]
    src = [place(torch.randn(shape), pair[0]) for shape in shapes]
    dst = [place(torch.zeros(30, *shape[1:]), pair[1]) for shape in shapes]
    src_ids, dst_ids = torch.tensor([0, 19, 7, 8]), torch.tensor([29, 3, 11, 12])
    ops.swap_kv_blocks(src, dst, src_ids, dst_ids)
    for a, b in zip(src, dst, strict=True):
        expected = torch.zeros(b.shape)
        expected[dst_ids] = a.cpu()[src_ids]
        assert torch.equal(b.cpu(), expected)


@pytest.mark.parametrize("pair", PAIRS)
def test_interleaved_keys_and_values_are_two_layers(pair):
    src = place(torch.randn(9, 2, 64), pair[0])
    dst = place(torch.zeros(9, 2, 64), pair[1])
    ids = torch.tensor([1, 5, 6])
    ops.swap_kv_blocks([src[:, 0], src[:, 1]], [dst[:, 0], dst[:, 1]], ids, ids + 1)
    expected = torch.zeros(9, 2, 64)
    expected[ids + 1] = src.cpu()[ids]
    assert torch.equal(dst.cpu(), expected)


@pytest.mark.parametrize("pair", PAIRS)
def test_nothing_to_do_is_done(pair):
    src, _ = block_cache(3, 8, 0, pair[0], fill=True)
    dst, backing = block_cache(3, 8, 0, pair[1], fill=False)
    none = torch.zeros(0, dtype=torch.int64)
    ops.swap_blocks(src, dst, 8, none.reshape(0, 2))
    ops.swap_kv_blocks([src], [dst], none, none)
    ops.swap_kv_blocks([], [], none, none)
    assert set(backing.cpu().tolist()) == {SENTINEL}


@pytest.mark.parametrize("pair", PAIRS)
def test_nothing_is_copied_when_one_id_is_wrong(pair):
    src, _ = block_cache(4, 16, 0, pair[0], fill=True)
    for bad in ([4, 0], [-1, 0], [0, 4], [0, -9], [0, 1]):
        dst, backing = block_cache(4, 16, 0, pair[1], fill=False)
        with pytest.raises(RuntimeError, match=r"block_mapping\[2, [01]\] is"):
            ops.swap_blocks(src, dst, 16, torch.tensor([[0, 1], [1, 2], bad]))
        assert set(backing.cpu().tolist()) == {SENTINEL}


def test_wrong_arguments_of_swap_blocks_are_named():
    src, dst = torch.zeros(4, 8), torch.zeros(6, 8)
    one = torch.tensor([[0, 1]])
    calls = [
        lambda: ops.swap_blocks(src, dst, 32, torch.tensor([[0, 1], [4, 2]])),
        lambda: ops.swap_blocks(src, dst, 32, torch.tensor([[0, -2]])),
        lambda: ops.swap_blocks(src, dst, 32, torch.tensor([[0, 1], [2, 3], [3, 1]])),
        lambda: ops.swap_blocks(src, src, 32, torch.tensor([[0, 1], [2, 0]])),
        lambda: ops.swap_blocks(src, dst, 16, one),
        lambda: ops.swap_blocks(src, torch.zeros(6, 9), 32, one),
        lambda: ops.swap_blocks(src, dst, 32, one.int()),
        lambda: ops.swap_blocks(src, dst, 32, one[0]),
        lambda: ops.swap_blocks(src, dst, 32, torch.zeros(1, 3, dtype=torch.int64)),
        lambda: ops.swap_blocks(torch.zeros(()), dst, 32, one),
        lambda: ops.swap_blocks(torch.zeros(4, 16)[:, ::2], dst, 32, one),
        lambda: ops.swap_blocks(src, torch.zeros(8).expand(6, 8), 32, one),
        lambda: ops.swap_blocks(torch.zeros(4, 4, 2).mT, torch.zeros(6, 2, 4), 32, one),
    ]
    assert_expected_inline(
        "\n".join(message_of(call) for call in calls),
        """\
torch_kvswap::swap_blocks: block_mapping[1, 0] is 4, but src has 4 blocks; expected 0 to 3
torch_kvswap::swap_blocks: block_mapping[0, 1] is -2, but dst has 6 blocks; expected 0 to 5
torch_kvswap::swap_blocks: block_mapping[2, 1] is 1, as is block_mapping[0, 1]; a call can write a block only once
torch_kvswap::swap_blocks: block 0 of src, read at block_mapping[0, 0], and block 0 of dst, written at block_mapping[1, 1], share memory; the copies of one call run in any order: use two calls
torch_kvswap::swap_blocks: block_size_in_bytes is 16, but a block of src has 32 bytes; expected the same
torch_kvswap::swap_blocks: block_size_in_bytes is 32, but a block of dst has 36 bytes; expected the same
torch_kvswap::swap_blocks: block_mapping has dtype Int; expected Long (torch.int64)
torch_kvswap::swap_blocks: block_mapping has shape [2]; expected [n, 2]: pairs of source and destination
torch_kvswap::swap_blocks: block_mapping has shape [1, 3]; expected [n, 2]: pairs of source and destination
torch_kvswap::swap_blocks: src has no dimension; expected blocks along dimension 0
torch_kvswap::swap_blocks: src has shape [4, 8] and strides [16, 2], so that a block has gaps or overlaps itself; expected every dimension but the first to be dense
torch_kvswap::swap_blocks: dst has shape [6, 8] and strides [0, 1]: its blocks of 32 bytes lie 0 bytes apart and overlap; expected stride(0) of at least a block
torch_kvswap::swap_blocks: a block of src and a block of dst keep their elements in different orders of dimensions; expected the same shape and strides within a block, or contiguous blocks on both sides""",
    )


@pytest.mark.parametrize("beside", [False, True], ids=["elsewhere", "beside the source"])
@pytest.mark.parametrize("offset", [48, 49, 56, 63])
def test_a_block_reaching_into_another_tensors_is_seen(offset, beside):
    """Block 0 of the second tensor begins behind block 0 of the first, and ends in its block 1."""
    storage = torch.zeros(320, dtype=torch.uint8)
    dst = [storage.as_strided((3, 16), (64, 1), begin) for begin in (64, 64 + offset)]
    source = storage[:48] if beside else torch.ones(48, dtype=torch.uint8)
    src, ids = [source.view(3, 16)] * 2, torch.tensor([0, 1])
    for order in (1, -1):
        if offset == 48:  # the control: side by side
            ops.swap_kv_blocks(src, dst[::order], ids, ids)
            continue
        with pytest.raises(RuntimeError, match="share memory"):
            ops.swap_kv_blocks(src, dst[::order], ids, ids)
        assert not storage.any()


def test_a_block_written_before_being_read_is_seen():
    storage, ids = torch.zeros(256, dtype=torch.uint8), torch.tensor([0])
    block = [storage[begin : begin + 16].view(1, 16) for begin in range(0, 240, 8)]
    ops.swap_kv_blocks([block[0], block[10]], [block[20], block[8]], ids, ids)
    with pytest.raises(RuntimeError, match="share memory"):
        ops.swap_kv_blocks([block[0], block[10]], [block[20], block[9]], ids, ids)


def test_wrong_arguments_of_swap_kv_blocks_are_named():
    src, dst = [torch.zeros(4, 8)] * 2, [torch.zeros(6, 8), torch.zeros(5, 8)]
    ids = torch.tensor([0, 3])
    storage = torch.zeros(100)
    views = [storage.as_strided((4, 8), (10, 1)), storage.as_strided((4, 8), (10, 1), 4)]
    calls = [
        lambda: ops.swap_kv_blocks(src, dst, ids, torch.tensor([0, 5])),
        lambda: ops.swap_kv_blocks(src, dst[:1], ids, ids),
        lambda: ops.swap_kv_blocks(src, dst, ids, ids[:1]),
        lambda: ops.swap_kv_blocks(src, dst, ids.int(), ids),
        lambda: ops.swap_kv_blocks(src, dst, ids[None], ids),
        lambda: ops.swap_kv_blocks(src, dst, ids, torch.tensor([2, 2])),
        lambda: ops.swap_kv_blocks(src, [dst[0], dst[0]], ids, ids),
        lambda: ops.swap_kv_blocks(src, views, ids, ids),
        lambda: ops.swap_kv_blocks(src, [dst[0], torch.zeros(6, 9)], ids, ids),
    ]
    assert_expected_inline(
        "\n".join(message_of(call) for call in calls),
        """\
torch_kvswap::swap_kv_blocks: dst_block_ids[1] is 5, but dst[1] has 5 blocks; expected 0 to 4
torch_kvswap::swap_kv_blocks: src has 2 tensors and dst has 1; expected a pair for each layer
torch_kvswap::swap_kv_blocks: src_block_ids has 2 ids and dst_block_ids has 1; expected the same number
torch_kvswap::swap_kv_blocks: src_block_ids has dtype Int; expected Long (torch.int64)
torch_kvswap::swap_kv_blocks: src_block_ids has shape [1, 2]; expected one dimension
torch_kvswap::swap_kv_blocks: dst_block_ids[1] is 2, as is dst_block_ids[0]; a call can write a block only once
torch_kvswap::swap_kv_blocks: block 0 of dst[0], written at dst_block_ids[0], and block 0 of dst[1], written at dst_block_ids[0], share memory; the copies of one call run in any order: use two calls
torch_kvswap::swap_kv_blocks: block 0 of dst[0], written at dst_block_ids[0], and block 0 of dst[1], written at dst_block_ids[0], share memory; the copies of one call run in any order: use two calls
torch_kvswap::swap_kv_blocks: a block of src[1] has 32 bytes and a block of dst[1] 36; expected the same""",
    )


def test_a_tensor_whose_storage_was_freed_is_refused():
    src, dst, mapping = torch.zeros(4, 8), torch.zeros(6, 8), torch.tensor([[0, 1]])
    for freed, name in ((src, "src"), (dst, "dst"), (mapping, "block_mapping")):
        size = freed.untyped_storage().size()
        for left in (0, size - 1):
            freed.untyped_storage().resize_(left)
            assert message_of(lambda: ops.swap_blocks(src, dst, 32, mapping)) == (
                f"torch_kvswap::swap_blocks: {name} reaches to byte {size} of its storage, which "
                f"has {left}; it was freed or resized: bring its memory back first"
            )
        freed.untyped_storage().resize_(size)


def test_blocks_without_bytes_are_nothing_to_copy():
    ops.swap_blocks(torch.empty(2**45, 0), torch.empty(2**45, 0), 0, torch.tensor([[5, 6]]))


@GPU
def test_ids_and_addresses_on_the_gpu_are_refused():
    cache, ids = torch.zeros(4, 8, device="cuda"), torch.zeros(1, 2, dtype=torch.int64).cuda()
    for call in (
        lambda: ops.swap_blocks(cache, cache, 32, ids),
        lambda: ops.swap_blocks_batch(ids[0], ids[0], ids[0]),
    ):
        assert "is on cuda:0; expected a CPU tensor" in message_of(call)


@GPU
@pytest.mark.parametrize("to_host", [True, False], ids=["to host", "to gpu"])
@pytest.mark.parametrize("kinds", [("pinned", "cpu"), ("cpu", "pinned"), ("cpu", "cpu")])
def test_pinned_and_pageable_tensors_mix_in_a_call(kinds, to_host):
    """Some drivers refuse pageable memory in a batch call: no tensor of the call may be in one."""
    host = [place(torch.randn(20, 48), kind) for kind in kinds]
    gpu = [torch.randn(20, 48, device="cuda") for _ in kinds]
    src, dst = (gpu, host) if to_host else (host, gpu)
    src_ids, dst_ids = torch.tensor([0, 19, 7, 8]), torch.tensor([9, 3, 11, 14])
    expected = [b.cpu().clone() for b in dst]
    for a, b in zip(src, expected, strict=True):
        b[dst_ids] = a.cpu()[src_ids]
    ops.swap_kv_blocks(src, dst, src_ids, dst_ids)
    for b, of_b in zip(dst, expected, strict=True):
        assert torch.equal(b.cpu(), of_b)


@GPU
@pytest.mark.parametrize("where", ["cpu", "pinned"])
def test_a_host_destination_holds_the_bytes_on_return(where):
    src = torch.zeros(64, 1 << 20, dtype=torch.uint8, device="cuda")
    dst = place(torch.zeros(64, 1 << 20, dtype=torch.uint8), where)
    mapping = torch.arange(64)[:, None].expand(64, 2)
    torch.cuda.synchronize()
    keep_busy(100)
    src.fill_(9)
    ops.swap_blocks(src, dst, 1 << 20, mapping)
    assert bool((dst == 9).all())


@GPU
@pytest.mark.parametrize("where", ["cpu", "pinned"])
def test_a_host_source_may_change_on_return(where):
    src = place(torch.full((64, 1 << 20), 3, dtype=torch.uint8), where)
    dst = torch.zeros(64, 1 << 20, dtype=torch.uint8, device="cuda")
    mapping = torch.arange(64)[:, None].expand(64, 2)
    torch.cuda.synchronize()
    keep_busy(100)
    ops.swap_blocks(src, dst, 1 << 20, mapping)
    src.fill_(0)
    assert bool((dst == 3).all())


@GPU
@pytest.mark.parametrize("pair", [("cuda", "pinned"), ("pinned", "cuda"), ("cuda", "cuda")])
def test_a_thread_that_never_used_cuda_can_swap(pair):
    src = place(torch.randn(8, 64), pair[0])
    dst = place(torch.zeros(8, 64), pair[1])
    torch.cuda.synchronize()
    errors = []

    def swap():
        try:
            ops.swap_blocks(src, dst, 256, torch.tensor([[1, 2], [5, 3]]))
            torch.cuda.current_stream().synchronize()
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=swap)
    thread.start()
    thread.join()
    assert errors == []
    assert torch.equal(dst.cpu()[[2, 3]], src.cpu()[[1, 5]])


@GPU
def test_a_captured_copy_within_a_gpu_replays():
    src, dst = torch.zeros(8, 64, device="cuda"), torch.zeros(8, 64, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops.swap_blocks(src, dst, 256, torch.tensor([[1, 2], [5, 3]]))
    src.fill_(6)
    graph.replay()
    assert dst[:, 0].tolist() == [0, 0, 6, 6, 0, 0, 0, 0]


@GPU
def test_capture_with_a_host_operand_is_refused():
    src, dst = torch.zeros(8, 64, device="cuda"), torch.zeros(8, 64).pin_memory()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        src.fill_(1)
        with pytest.raises(RuntimeError, match="capture swap_blocks_batch with pinned memory"):
            ops.swap_blocks(src, dst, 256, torch.tensor([[1, 2]]))
    graph.replay()
    assert bool((src == 1).all())
