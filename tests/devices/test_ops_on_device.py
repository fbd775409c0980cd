"""The ops on tensors of an accelerator that only PyTorch knows."""

import pytest
import torch
from device_pairs import place
from error_text import message_of
from fake_accelerator import DEVICE_TYPE, on_fake_accelerator

from torch_kvswap import ops
from torch_kvswap.devices import blocks, generic_ops

OPS = torch.ops.torch_kvswap
DEVICE = f"{DEVICE_TYPE}:0"
PAIRS = [
    *(("cpu", DEVICE), ("pinned", DEVICE)),
    *((DEVICE, "cpu"), (DEVICE, "pinned"), (DEVICE, DEVICE)),
]
ONE_BLOCK = torch.tensor([[0, 1]])


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("staging_bytes", [32 << 20, 1000])
@on_fake_accelerator
def test_blocks_move_between_all_devices(accelerator, pair, staging_bytes):
    limit, generic_ops.STAGING_BYTES = generic_ops.STAGING_BYTES, staging_bytes
    try:
        values, old = torch.randn(40, 2, 16).half(), torch.randn(50, 2, 20).half()
        mapping = torch.stack([torch.randperm(40)[:13], torch.randperm(50)[:13]], 1)
        expected = old.clone()
        expected[mapping[:, 1], :, :16] = values[mapping[:, 0]]
        src, dst = place(values, pair[0]), place(old, pair[1])
        for head in range(2):  # as layers: blocks that lie apart
            sides = [src[:, head]], [dst[:, head, :16]]
            ops.swap_kv_blocks(*sides, mapping[:, 0], mapping[:, 1])
        assert torch.equal(dst.cpu(), expected)

        whole = place(torch.zeros(50, 2, 16, dtype=torch.half), pair[1])
        ops.swap_blocks(src, whole, 64, mapping)
        assert torch.equal(whole.cpu()[mapping[:, 1]], values[mapping[:, 0]])
    finally:
        generic_ops.STAGING_BYTES = limit


@on_fake_accelerator
def test_layers_of_different_sizes_move(accelerator):
    src = [torch.randn(20, *shape) for shape in [(2, 16), (48,), (1, 7, 3)]]
    dst = [torch.zeros(30, *tensor.shape[1:], device=DEVICE_TYPE) for tensor in src]
    src_ids, dst_ids = torch.tensor([0, 19, 7, 8]), torch.tensor([29, 3, 11, 12])
    ops.swap_kv_blocks(src, dst, src_ids, dst_ids)
    for a, b in zip(src, dst, strict=True):
        expected = torch.zeros(b.shape)
        expected[dst_ids] = a[src_ids]
        assert torch.equal(b.cpu(), expected)


@on_fake_accelerator
def test_device_copies_run_on_the_current_stream(accelerator):
    src, ones = torch.zeros(4, 8, device=DEVICE), torch.ones(4, 8, device=DEVICE)
    dst, early = torch.zeros(2, 4, 8, device=DEVICE)
    torch.accelerator.synchronize()
    with torch.Stream(DEVICE) as stream, accelerator.hold(stream):
        src.copy_(ones)
        ops.swap_blocks(src, dst, 32, ONE_BLOCK)  # does not wait
        with torch.Stream(DEVICE) as other:  # the control
            ops.swap_blocks(src, early, 32, ONE_BLOCK)
        other.synchronize()
    stream.synchronize()
    assert dst.cpu()[1].tolist() == [1] * 8
    assert early.cpu()[1].tolist() == [0] * 8


@on_fake_accelerator
def test_ids_and_staging_may_be_reused_at_once(accelerator):
    src, dst = torch.arange(8.0, device=DEVICE_TYPE)[:, None], torch.zeros(8, 1).to(DEVICE_TYPE)
    mapping = ONE_BLOCK.clone()
    with accelerator.hold(torch.accelerator.current_stream()):
        for block in range(8):
            mapping.copy_(torch.tensor([[block, 7 - block]]))
            ops.swap_blocks(src, dst, 4, mapping)
        mapping.zero_()
    assert dst.flatten().tolist() == [7, 6, 5, 4, 3, 2, 1, 0]


@on_fake_accelerator
def test_a_default_device_changes_no_copy_of_ids(accelerator):
    blocks.can_pin.cache_clear()
    with torch.device(DEVICE_TYPE):
        assert blocks.can_pin(DEVICE_TYPE)


@pytest.mark.parametrize("where", ["cpu", "pinned"])
@on_fake_accelerator
def test_a_host_destination_is_complete_on_return(accelerator, where):
    src, dst = torch.ones(4, 8, device=DEVICE_TYPE), place(torch.zeros(4, 8), where)
    unfinished = torch.zeros(4, 8).pin_memory()
    with accelerator.hold(torch.accelerator.current_stream(), until_waited=True):
        unfinished.copy_(src, non_blocking=True)
        assert not unfinished.any()  # the control
        ops.swap_blocks(src, dst, 32, ONE_BLOCK)
        assert dst[1].tolist() == [1] * 8


@pytest.mark.parametrize("where", ["cpu", "pinned"])
@on_fake_accelerator
def test_a_host_source_may_change_after_return(accelerator, where):
    src, dst = place(torch.ones(4, 8), where), torch.zeros(4, 8, device=DEVICE_TYPE)
    early, late = torch.ones(4, 8).pin_memory(), torch.zeros(4, 8, device=DEVICE_TYPE)
    ops.swap_blocks(src, dst, 32, ONE_BLOCK)
    src.zero_()
    with accelerator.hold(torch.accelerator.current_stream()):
        late.copy_(early, non_blocking=True)
        early.zero_()
    assert dst.cpu()[1].tolist() == [1] * 8
    assert not late.cpu().any()  # the control


@on_fake_accelerator
def test_earlier_copies_end_before_host_memory_is_used(accelerator):
    ones = torch.ones(4, 8, device=DEVICE_TYPE)
    written, read = torch.zeros(4, 8).pin_memory(), torch.zeros(4, 8).pin_memory()
    taken, received = torch.zeros(4, 8).to(DEVICE_TYPE), torch.ones(4, 8).to(DEVICE_TYPE)
    stream = torch.accelerator.current_stream()
    with accelerator.hold(stream, until_waited=True):
        written.copy_(ones, non_blocking=True)
        assert not written.any()  # the control
        ops.swap_blocks(written, taken, 32, ONE_BLOCK)
    with accelerator.hold(stream, until_waited=True):
        received.copy_(read, non_blocking=True)
        ops.swap_blocks(ones, read, 32, ONE_BLOCK)
    assert taken.cpu()[1].tolist() == [1] * 8
    assert not received.cpu().any()
    assert read[1].tolist() == [1] * 8


@on_fake_accelerator
def test_ids_expand_on_the_device(accelerator):
    ids = torch.tensor([3, 5], device=DEVICE_TYPE)
    got = ops.expand_block_ids(ids, 4, 1, 6)
    assert got.device == ids.device
    assert got.tolist() == [13, 14, 15, 20, 21, 22]


@on_fake_accelerator
def test_errors_name_the_device(accelerator):
    there, here = torch.zeros(4, 8, device=DEVICE), torch.zeros(4, 8)
    one, ids = torch.tensor([1]), torch.arange(20).to(DEVICE)
    calls = {
        "swap_blocks: block_mapping is on fakeaccel:0; expected a CPU tensor, call .cpu()": (
            lambda: ops.swap_blocks(there, here, 32, ONE_BLOCK.to(DEVICE))
        ),
        "swap_kv_blocks: dst[1] is on cpu, but dst[0] is on fakeaccel:0; expected all on one "
        "device": lambda: ops.swap_kv_blocks([here, here], [there, here], one, one),
        "expand_block_ids: out is on cpu, but block_ids is on fakeaccel:0; expected the same "
        "device": lambda: ops.expand_block_ids(ids[:2], 4, out=ids[:8].cpu()),
    }
    for text, call in calls.items():
        assert message_of(call) == f"torch_kvswap::{text}"
    assert not there.any().item()
    assert ops.expand_block_ids(ids[:2], 4, out=ids[2:10]).tolist() == list(range(8))
