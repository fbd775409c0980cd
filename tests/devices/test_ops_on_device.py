"""The ops on tensors of an accelerator that only PyTorch knows."""

import pytest
import torch
from device_pairs import place
from error_text import message_of
from fake_accelerator import DEVICE_TYPE, on_fake_accelerator

from torch_kvswap import ops
from torch_kvswap.devices import blocks, generic_ops

OPS = torch.ops.torch_kvswap
FIRST, SECOND = f"{DEVICE_TYPE}:0", f"{DEVICE_TYPE}:1"
PLACES = ("cpu", "pinned", FIRST, SECOND)
PAIRS = [(src, dst) for src in PLACES for dst in PLACES if src in PLACES[2:] or dst in PLACES[2:]]
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
def test_all_layers_move_in_one_copy(accelerator):
    src = [torch.randn(20, *shape) for shape in [(2, 16), (48,), (1, 7, 3)]]
    dst = [torch.zeros(30, *tensor.shape[1:], device=DEVICE_TYPE) for tensor in src]
    src_ids, dst_ids = torch.tensor([0, 19, 7, 8]), torch.tensor([29, 3, 11, 12])
    before = accelerator.counters()
    ops.swap_kv_blocks(src, dst, src_ids, dst_ids)
    after = accelerator.counters()
    assert after.copies_to_device - before.copies_to_device == 2  # with the ids
    for a, b in zip(src, dst, strict=True):
        expected = torch.zeros(b.shape)
        expected[dst_ids] = a[src_ids]
        assert torch.equal(b.cpu(), expected)


@pytest.mark.parametrize("target", [FIRST, SECOND])
@on_fake_accelerator
def test_a_copy_between_devices_runs_on_the_current_streams_and_does_not_wait(accelerator, target):
    src, ones = torch.zeros(4, 8, device=FIRST), torch.ones(4, 8, device=FIRST)
    dst, early = torch.zeros(2, 4, 8, device=target)
    for device in (FIRST, SECOND):
        torch.accelerator.synchronize(device)
    with torch.Stream(SECOND) as second, torch.Stream(FIRST) as first:
        held = accelerator.hold(first)
        src.copy_(ones)
        ops.swap_blocks(src, dst, 32, ONE_BLOCK)  # returns although the stream stands still
    with torch.Stream(SECOND) as others_second, torch.Stream(FIRST):  # the control: other streams
        ops.swap_blocks(src, early, 32, ONE_BLOCK)
        torch.accelerator.current_stream().synchronize()
        others_second.synchronize()
    held.release()
    first.synchronize()
    second.synchronize()
    assert dst.cpu()[1].tolist() == [1] * 8
    assert early.cpu()[1].tolist() == [0] * 8


@on_fake_accelerator
def test_ids_and_staging_memory_may_be_used_again_before_the_copy_runs(accelerator):
    src, dst = torch.arange(8.0, device=DEVICE_TYPE)[:, None], torch.zeros(8, 1).to(DEVICE_TYPE)
    mapping = ONE_BLOCK.clone()
    with accelerator.hold(torch.accelerator.current_stream()):
        for block in range(8):
            mapping.copy_(torch.tensor([[block, 7 - block]]))
            ops.swap_blocks(src, dst, 4, mapping)
        mapping.zero_()
    assert dst.flatten().tolist() == [7, 6, 5, 4, 3, 2, 1, 0]


@on_fake_accelerator
def test_a_default_device_does_not_change_how_ids_are_copied(accelerator):
    blocks.can_pin.cache_clear()
    with torch.device(DEVICE_TYPE):
        assert blocks.can_pin(DEVICE_TYPE)


@pytest.mark.parametrize("where", ["cpu", "pinned"])
@on_fake_accelerator
def test_a_host_destination_is_complete_when_the_op_returns(accelerator, where):
    src, dst = torch.ones(4, 8, device=DEVICE_TYPE), place(torch.zeros(4, 8), where)
    unfinished = torch.zeros(4, 8).pin_memory()
    with accelerator.hold_copies():
        unfinished.copy_(src, non_blocking=True)
        assert not unfinished.any()  # the control
    accelerator.set_copy_delay(0.05)
    ops.swap_blocks(src, dst, 32, ONE_BLOCK)
    assert dst[1].tolist() == [1] * 8


@pytest.mark.parametrize("where", ["cpu", "pinned"])
@on_fake_accelerator
def test_a_host_source_may_be_overwritten_when_the_op_has_returned(accelerator, where):
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
def test_earlier_copies_in_the_stream_end_before_host_memory_is_used(accelerator):
    ones = torch.ones(4, 8, device=DEVICE_TYPE)
    written, read = torch.zeros(4, 8).pin_memory(), torch.zeros(4, 8).pin_memory()
    taken, received = torch.zeros(4, 8).to(DEVICE_TYPE), torch.ones(4, 8).to(DEVICE_TYPE)
    unfinished = torch.zeros(4, 8).pin_memory()
    with accelerator.hold_copies():
        unfinished.copy_(ones, non_blocking=True)
        assert not unfinished.any()  # the control
    accelerator.set_copy_delay(0.05)
    written.copy_(ones, non_blocking=True)
    ops.swap_blocks(written, taken, 32, ONE_BLOCK)
    received.copy_(read, non_blocking=True)
    ops.swap_blocks(ones, read, 32, ONE_BLOCK)
    assert taken.cpu()[1].tolist() == [1] * 8
    assert not received.cpu().any()
    assert read[1].tolist() == [1] * 8


@pytest.mark.parametrize(
    ("call", "nth"), [("allocate", 1), ("allocate", 2), ("copy", 1), ("kernel", 1), ("kernel", 2)]
)
@on_fake_accelerator
def test_a_failure_of_the_device_is_raised_and_the_next_call_succeeds(accelerator, call, nth):
    src, dst = torch.ones(4, 8, device=DEVICE_TYPE), torch.zeros(4, 8, device=DEVICE_TYPE)
    accelerator.fail(call, nth)
    with pytest.raises(RuntimeError, match=f"{call} call [0-9]+ fails"):
        ops.swap_blocks(src, dst, 32, ONE_BLOCK)
    assert not dst.any().item()
    ops.swap_blocks(src, dst, 32, ONE_BLOCK)
    assert dst[1].tolist() == [1] * 8


@on_fake_accelerator
def test_ids_expand_on_the_device(accelerator):
    ids = torch.tensor([3, 5], device=DEVICE_TYPE)
    with accelerator.hold(torch.accelerator.current_stream()):
        got = ops.expand_block_ids(ids, 4, 1, 6)  # does not wait
    assert got.device == ids.device
    assert got.tolist() == [13, 14, 15, 20, 21, 22]


@on_fake_accelerator
def test_errors_name_the_device(accelerator):
    there, here = torch.zeros(4, 8, device=FIRST), torch.zeros(4, 8)
    other, one = torch.zeros(4, 8, device=SECOND), torch.tensor([1])
    ids = torch.arange(20).to(FIRST)
    calls = {
        "swap_blocks: block_mapping is on fakeaccel:0; expected a CPU tensor, call .cpu()": (
            lambda: ops.swap_blocks(there, here, 32, ONE_BLOCK.to(FIRST))
        ),
        "swap_kv_blocks: dst[1] is on cpu, but dst[0] is on fakeaccel:0; expected all on one "
        "device": lambda: ops.swap_kv_blocks([here, here], [there, here], one, one),
        "swap_kv_blocks: src[1] is on fakeaccel:1, but src[0] is on fakeaccel:0; expected all on "
        "one device": lambda: ops.swap_kv_blocks([there, other], [here, here], one, one),
        "expand_block_ids: out is on cpu, but block_ids is on fakeaccel:0; expected the same "
        "device": lambda: ops.expand_block_ids(ids[:2], 4, out=ids[:8].cpu()),
        "expand_block_ids: out and block_ids share memory; expected memory of its own": (
            lambda: ops.expand_block_ids(ids[:2], 4, out=ids[1:9])
        ),
        "swap_blocks: block 1 of src, read at block_mapping[1, 0], and block 1 of dst, written at "
        "block_mapping[0, 1], share memory; the copies of one call run in any order: use two "
        "calls": lambda: ops.swap_blocks(there, there, 32, torch.tensor([[0, 1], [1, 2]])),
    }
    for text, call in calls.items():
        assert message_of(call) == f"torch_kvswap::{text}"
    assert not there.any().item()
    assert ops.expand_block_ids(ids[:2], 4, out=ids[2:10]).tolist() == list(range(8))


@on_fake_accelerator
def test_a_copy_of_addresses_is_refused(accelerator):
    src, dst = torch.ones(4, device=DEVICE_TYPE), torch.zeros(4)
    addresses = [torch.tensor([tensor.data_ptr()]) for tensor in (src, dst)]
    assert message_of(lambda: ops.swap_blocks_batch(*addresses, torch.tensor([16]))) == (
        "torch_kvswap::swap_blocks_batch: the accelerator of this process is fakeaccel, whose "
        "addresses only torch knows; use swap_blocks or swap_kv_blocks, which take tensors of any "
        "device"
    )
    assert not dst.any()
