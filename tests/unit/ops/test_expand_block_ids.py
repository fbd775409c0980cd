import pytest
import torch
from error_text import message_of
from expecttest import assert_expected_inline
from gpu_cache import keep_busy

from torch_kvswap import ops

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def reference(ids, factor, skip=0, count=None):
    expanded = [i * factor + j for i in ids for j in range(factor)][skip:]
    return expanded if count is None else expanded[:count]


@pytest.mark.parametrize("device", DEVICES)
def test_a_million_outputs_are_right(device):
    ids = torch.randperm(1 << 16)
    got = ops.expand_block_ids(ids.to(device), 16)
    assert torch.equal(got.cpu(), (ids[:, None] * 16 + torch.arange(16)).flatten())


@pytest.mark.gpu
def test_cuda_writes_on_the_current_stream():
    stream = torch.cuda.Stream()
    ids = torch.zeros(1000, dtype=torch.int64, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        keep_busy(100)
        ids.fill_(5)
        got = ops.expand_block_ids(ids, 2)
    stream.synchronize()
    assert torch.equal(got.cpu(), torch.tensor([10, 11]).repeat(1000))


@pytest.mark.gpu
def test_another_current_device_does_not_matter():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    got = ops.expand_block_ids(torch.tensor([3, 4], device="cuda:1"), 2)
    assert torch.cuda.current_device() == 0
    assert got.device == torch.device("cuda:1")
    assert got.tolist() == [6, 7, 8, 9]


def test_wrong_arguments_are_named():
    ids, large = torch.tensor([3, -1]), torch.arange(8)
    calls = [
        lambda: ops.expand_block_ids(ids, 2),
        lambda: ops.expand_block_ids(ids, 0),
        lambda: ops.expand_block_ids(ids, 2, 5),
        lambda: ops.expand_block_ids(ids, 2, -1),
        lambda: ops.expand_block_ids(ids, 2, 0, -3),
        lambda: ops.expand_block_ids(ids.int(), 2),
        lambda: ops.expand_block_ids(ids[None], 2),
        lambda: ops.expand_block_ids(ids, 2, out=torch.zeros(3, dtype=torch.int64)),
        lambda: ops.expand_block_ids(ids, 2, out=torch.zeros(4)),
        lambda: ops.expand_block_ids(ids.repeat(2), 1 << 62),
        lambda: ops.expand_block_ids(torch.tensor([1 << 62]), 2),
        lambda: ops.expand_block_ids(large[1:4], 2, out=large[:6]),
        lambda: ops.expand_block_ids(ids, 2, out=large[:1].expand(4)),
    ]
    assert_expected_inline(
        "\n".join(message_of(call) for call in calls),
        """\
torch_kvswap::expand_block_ids: block_ids[1] is -1; expected 0 to 4611686018427387903
torch_kvswap::expand_block_ids: block_size_factor is 0; expected 1 or more
torch_kvswap::expand_block_ids: skip_count is 5, but the ids expand to 4; expected 0 to 4
torch_kvswap::expand_block_ids: skip_count is -1, but the ids expand to 4; expected 0 to 4
torch_kvswap::expand_block_ids: count is -3; expected 0 or more
torch_kvswap::expand_block_ids: block_ids has dtype Int; expected Long (torch.int64)
torch_kvswap::expand_block_ids: block_ids has shape [1, 2]; expected one dimension
torch_kvswap::expand_block_ids: out has shape [3]; expected [4]
torch_kvswap::expand_block_ids: out has dtype Float; expected Long (torch.int64)
torch_kvswap::expand_block_ids: block_size_factor is 4611686018427387904: 4 ids expand to more than int64 can count
torch_kvswap::expand_block_ids: block_ids[0] is 4611686018427387904; expected 0 to 4611686018427387903
torch_kvswap::expand_block_ids: out and block_ids share memory; expected memory of its own
torch_kvswap::expand_block_ids: out has stride 0, so that its elements share memory; expected memory of its own""",
    )


@pytest.mark.parametrize("factor", [1, 2, 3, 15, 16, 17, 40])
@pytest.mark.parametrize("step", [1, 3])
@pytest.mark.parametrize("out_step", [1, 2])
@pytest.mark.parametrize("device", DEVICES)
def test_every_factor_and_stride_expands_the_same(device, factor, step, out_step):
    ids = torch.randint(0, (1 << 62) // factor, (7 * step,), device=device)[::step]
    total = 7 * factor
    for skip in {0, 1, factor, factor + 1, total - 1}:
        for count in {1, factor, total - skip}:
            count = min(count, total - skip)
            backing = torch.full(((count + 2) * out_step,), -7, device=device)
            out = backing[out_step : (count + 1) * out_step : out_step]
            ops.expand_block_ids(ids, factor, skip, count, out=out)
            assert out.tolist() == reference(ids.tolist(), factor, skip, count)
            out.fill_(-7)
            assert set(backing.tolist()) == {-7}


@pytest.mark.parametrize("factor", [1, 2, 3, 5, 7, 16, 1000])
@pytest.mark.parametrize("step", [1, 2])
def test_the_largest_countable_id_is_the_last(factor, step):
    largest = 2**63 // factor - 1  # largest * factor + factor - 1 is the last int64, or before it
    assert (largest + 1) * factor - 1 <= 2**63 - 1 < (largest + 2) * factor - 1
    ids = torch.zeros(3 * step, dtype=torch.int64)[::step]
    ids[1] = largest
    expanded = ops.expand_block_ids(ids, factor)
    assert expanded[2 * factor - 1] == largest * factor + factor - 1
    if factor == 1:
        return  # every int64 is an id
    ids[1] = largest + 1
    with pytest.raises(RuntimeError, match=rf"block_ids\[1\] is {largest + 1}; expected 0 to"):
        ops.expand_block_ids(ids, factor)


@pytest.mark.parametrize("step", [1, 2])
def test_nothing_is_written_when_any_id_is_wrong(step):
    largest = (2**63 - 1 - 15) // 16
    ids = torch.arange(100 * step)[::step]
    ids[40] = largest
    out = torch.full((1600,), -7)
    ops.expand_block_ids(ids, 16, out=out)
    assert out[655] == largest * 16 + 15
    out.fill_(-7)
    for wrong in (-1, -(2**63), largest + 1, 2**63 - 1):
        ids[90] = wrong
        with pytest.raises(RuntimeError, match=rf"block_ids\[90\] is {wrong}; expected 0 to"):
            ops.expand_block_ids(ids, 16, out=out)
    assert set(out.tolist()) == {-7}
    assert ops.expand_block_ids(ids, 16, 0, 90 * 16).tolist()[:2] == [0, 1]  # the wrong is not read
