"""The kernels for any device of PyTorch, run on tensors of the CPU and of the meta device.

tests/devices/test_ops_on_device.py runs them on an accelerator.
"""

import pytest
import torch
from error_text import message_of

from torch_kvswap.devices import generic_ops

OPS = torch.ops.torch_kvswap
# Dispatches as if a tensor were on such a device.
GENERIC = torch._C.DispatchKeySet(torch._C.DispatchKey.PrivateUse1)
SENTINEL = 0xA5


def generic(op, *operands, **named):
    """What the op does with the kernel for any device."""
    return op.redispatch(GENERIC, *operands, **named)


def blocks(count, block_bytes, padding, offset, fill):
    """A uint8 tensor [count, block_bytes] with `padding` bytes between blocks, and what backs it."""
    backing = torch.full((offset + count * (block_bytes + padding),), SENTINEL, dtype=torch.uint8)
    if fill:
        backing.random_(0, 256)
    return backing.as_strided((count, block_bytes), (block_bytes + padding, 1), offset), backing


def random_mapping(num_src, num_dst, num_ids):
    return torch.stack([torch.randint(num_src, (num_ids,)), torch.randperm(num_dst)[:num_ids]], 1)


@pytest.fixture(params=[32 << 20, 4000, 1])
def staging_bytes(request, monkeypatch):
    """How many bytes are copied at once, and a list of the bytes of all staging memory."""
    monkeypatch.setattr(generic_ops, "STAGING_BYTES", request.param)
    allocate, allocated = generic_ops._staging, []

    def recorded(rows, words):
        allocated.append(words * rows.element_size())
        return allocate(rows, words)

    monkeypatch.setattr(generic_ops, "_staging", recorded)
    return request.param, allocated


@pytest.mark.parametrize("block_bytes", [1, 31, 4096])
@pytest.mark.parametrize(("padding", "offset"), [(0, 0), (17, 0), (4, 6)])
def test_just_the_mapped_bytes_move_through_bounded_memory(
    block_bytes, padding, offset, staging_bytes
):
    torch.manual_seed(block_bytes)
    for num_src, num_dst, num_ids in [(1, 1, 1), (7, 60, 5), (50, 23, 23)]:
        src, _ = blocks(num_src, block_bytes, padding, offset, fill=True)
        dst, backing = blocks(num_dst, block_bytes, offset, padding, fill=False)
        mapping = random_mapping(num_src, num_dst, num_ids)
        expected = backing.clone()
        view = expected.as_strided(dst.shape, dst.stride(), dst.storage_offset())
        view[mapping[:, 1]] = src[mapping[:, 0]]
        generic(OPS.swap_blocks.default, src, dst, block_bytes, mapping)
        assert torch.equal(backing, expected)
    limit, allocated = staging_bytes
    assert max(allocated) <= max(limit, block_bytes)


def test_inference_tensors_are_written_in_every_mode():
    with torch.inference_mode():
        dst, out = torch.zeros(4, 2), torch.zeros(2, dtype=torch.int64)
    generic(OPS.swap_blocks.default, torch.ones(4, 2), dst, 8, torch.tensor([[0, 1]]))
    generic(OPS.expand_block_ids.out, torch.tensor([3]), 2, out=out)
    assert dst.tolist() == [[0, 0], [1, 1], [0, 0], [0, 0]]
    assert out.tolist() == [6, 7]


def wrong_swaps():
    src, dst, ids = torch.zeros(4, 8), torch.zeros(6, 8), torch.tensor([0, 1])
    one = torch.tensor([[0, 1]])
    blocks_of, layers_of = OPS.swap_blocks.default, OPS.swap_kv_blocks.default
    return [
        (blocks_of, src, dst, 32, torch.tensor([[0, 1], [4, 2]])),
        (blocks_of, src, dst, 32, torch.tensor([[0, 1], [1, 1]])),
        (blocks_of, src, src, 32, torch.tensor([[0, 1], [1, 2]])),
        (blocks_of, src, dst, 16, one),
        (blocks_of, src, dst, 32, one.int()),
        (blocks_of, src, dst, 32, one[0]),
        (blocks_of, src, torch.zeros(6, 9), 32, one),
        (blocks_of, torch.zeros(4, 2, 8)[:, :, :4], dst, 32, one),
        (blocks_of, torch.zeros(4, 2, 4).transpose(1, 2), dst, 32, one),
        (blocks_of, torch.zeros(()), dst, 32, one),
        (layers_of, [src], [dst, dst], ids, ids),
        (layers_of, [src, src], [dst, dst], ids, ids),
        (layers_of, [src], [dst], ids, ids[:1]),
        (layers_of, [src, src.to("meta")], [dst, dst.clone()], ids, ids),
    ]


@pytest.mark.parametrize("number", range(len(wrong_swaps())))
def test_errors_are_those_of_the_native_kernels(number):
    op, src, dst, *others = wrong_swaps()[number]
    on_cpu = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
    expected = message_of(lambda: op.redispatch(on_cpu, src, dst, *others))
    for tensor in src if isinstance(src, list) else [src]:
        tensor.fill_(1)
    text = message_of(lambda: generic(op, src, dst, *others))
    assert text == expected
    if dst is not src:
        assert not any(tensor.any() for tensor in (dst if isinstance(dst, list) else [dst]))


@pytest.mark.parametrize("factor", [1, 2, 3, 16, 1 << 40])
@pytest.mark.parametrize(("skip", "count"), [(0, 64), (1, 5), (3, 0), (2, 1)])
def test_ids_expand_as_in_the_native_kernel(factor, skip, count):
    ids = torch.tensor([3, 9, 0, 9, 5, 1, 100, 7])[::2]
    expected = OPS.expand_block_ids.default(ids, factor, skip, count)
    got = generic(OPS.expand_block_ids.default, ids, factor, skip, count)
    assert torch.equal(got, expected)
    assert got.is_contiguous()
    out = torch.zeros(2 * len(expected), dtype=torch.int64)
    generic(OPS.expand_block_ids.out, ids, factor, skip, count, out=out[::2])
    assert torch.equal(out[::2], expected)
    assert not out[1::2].any()


def test_wrong_arguments_of_expand_are_named_alike():
    ids, large = torch.tensor([3, 1]), torch.arange(8)
    plain, into = OPS.expand_block_ids.default, OPS.expand_block_ids.out
    assert generic(plain, ids, 2).tolist() == [6, 7, 2, 3]
    calls = [
        (plain, (ids, 0), {}),
        (plain, (ids, 2, 5), {}),
        (plain, (ids, 2, -1), {}),
        (plain, (ids, 2, 0, -3), {}),
        (plain, (ids.int(), 2), {}),
        (plain, (ids[None], 2), {}),
        (into, (ids, 2), {"out": torch.zeros(3, dtype=torch.int64)}),
        (into, (ids, 2), {"out": torch.zeros(4)}),
        (into, (large[1:4], 2), {"out": large[:6]}),
        (into, (ids, 2), {"out": large[:1].expand(4)}),
    ]
    for op, operands, named in calls:
        expected = message_of(lambda: op(*operands, **named))  # noqa: B023
        assert message_of(lambda: generic(op, *operands, **named)) == expected  # noqa: B023


@pytest.mark.parametrize("key", generic_ops.DISPATCH_KEYS)
def test_every_op_has_a_kernel_for_each_device(key):
    for name in ("swap_blocks", "swap_kv_blocks", "expand_block_ids", "expand_block_ids.out"):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"torch_kvswap::{name}", key)
