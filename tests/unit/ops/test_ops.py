"""The ops' schemas, fake implementations and aliasing, as PyTorch checks them."""

from contextlib import nullcontext

import pytest
import torch
from error_text import message_of
from expecttest import assert_expected_inline
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode

from torch_kvswap import ops

OPS = torch.ops.torch_kvswap


def test_the_schemas_are_the_published_ones():
    overloads = [
        OPS.swap_blocks.default,
        OPS.swap_kv_blocks.default,
        OPS.swap_blocks_batch.default,
        OPS.expand_block_ids.default,
        OPS.expand_block_ids.out,
    ]
    assert_expected_inline(
        "\n".join(str(op._schema) for op in overloads),
        """\
torch_kvswap::swap_blocks(Tensor src, Tensor(a!) dst, SymInt block_size_in_bytes, Tensor block_mapping) -> ()
torch_kvswap::swap_kv_blocks(Tensor[] src, Tensor(a!)[] dst, Tensor src_block_ids, Tensor dst_block_ids) -> ()
torch_kvswap::swap_blocks_batch(Tensor src_ptrs, Tensor dst_ptrs, Tensor sizes, bool is_src_access_order_any=False) -> ()
torch_kvswap::expand_block_ids(Tensor block_ids, SymInt block_size_factor, SymInt skip_count=0, SymInt? count=None) -> Tensor
torch_kvswap::expand_block_ids.out(Tensor block_ids, SymInt block_size_factor, SymInt skip_count=0, SymInt? count=None, *, Tensor(a!) out) -> ()""",
    )


@pytest.mark.parametrize("op", [OPS.swap_blocks.default, OPS.swap_kv_blocks.default])
def test_compilers_keep_block_strides(op):
    assert {torch.Tag.needs_exact_strides, torch.Tag.cudagraph_unsafe} <= set(op.tags)


def test_the_tensor_ops_pass_opcheck():
    src, dst = torch.randn(6, 4), torch.zeros(5, 4)
    mapping = torch.tensor([[0, 1], [5, 4]])
    opcheck(OPS.swap_blocks.default, (src, dst, 16, mapping))
    opcheck(
        OPS.swap_kv_blocks.default, ([src, src], [dst, dst.clone()], mapping[:, 0], mapping[:, 1])
    )
    ids = torch.tensor([3, 1, 4])
    for arguments in [(ids, 2), (ids, 4, 3), (ids, 4, 3, 5), (ids, 4, 0, 0)]:
        opcheck(OPS.expand_block_ids.default, arguments)
    opcheck(OPS.expand_block_ids.out, (ids, 2, 1), {"out": torch.zeros(5, dtype=torch.int64)})


def test_the_op_on_addresses_has_no_fake():
    with torch._subclasses.FakeTensorMode():
        fake = torch.zeros(1, dtype=torch.int64)
        with pytest.raises(torch._subclasses.fake_tensor.UnsupportedOperatorException):
            ops.swap_blocks_batch(fake, fake, fake)


def writes():
    """A call of each op that writes a tensor, and that tensor."""
    src, dst, mapping = torch.ones(4, 2), torch.zeros(4, 2), torch.tensor([[0, 1]])
    ids, out = torch.tensor([3]), torch.zeros(2, dtype=torch.int64)
    return [
        (lambda: ops.swap_blocks(src, dst, 8, mapping), dst),
        (lambda: ops.swap_kv_blocks([src], [dst], mapping[:, 0], mapping[:, 1]), dst),
        (lambda: ops.expand_block_ids(ids, 2, out=out), out),
    ]


class PassingMode(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("op", range(3))
@pytest.mark.parametrize("mode", [nullcontext, torch.no_grad, PassingMode, FakeTensorMode])
def test_autograd_sees_a_write_in_every_mode(op, mode):
    with mode():
        write, written = writes()[op]
        before = written._version
        write()
    assert written._version > before


def test_autograd_sees_a_write_to_a_tensor_subclass():
    def two(tensor):
        return TwoTensor(tensor, tensor.clone())

    src, dst, mapping = two(torch.ones(4, 2)), two(torch.zeros(4, 2)), two(torch.tensor([[0, 1]]))
    before = dst._version
    ops.swap_blocks(src, dst, 8, mapping)
    assert dst._version > before
    assert dst.a[1].tolist() == dst.b[1].tolist() == [1, 1]


@pytest.mark.filterwarnings("ignore:Error detected in MulBackward0")
def test_a_backward_needing_overwritten_values_is_refused():
    def step(weight, src, dst, mapping):
        product = (weight * dst).sum()
        ops.swap_blocks(src, dst, 8, mapping)
        return product

    weight = torch.ones(4, 2, requires_grad=True)
    operands = torch.ones(4, 2), torch.zeros(4, 2), torch.tensor([[0, 1]])
    torch.compiler.reset()
    with pytest.raises(Exception, match="modified by an inplace operation"):
        torch.compile(step, backend="aot_eager", fullgraph=True)(weight, *operands).backward()


def test_backward_refuses_a_value_that_was_overwritten():
    src, dst, weight = torch.ones(4, 2), torch.zeros(4, 2), torch.ones(4, 2, requires_grad=True)
    product = (weight * dst).sum()
    ops.swap_blocks(src, dst, 8, torch.tensor([[0, 1]]))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


@pytest.mark.parametrize("kind", ["leaf", "view", "computed"])
@pytest.mark.parametrize("op", ["swap_blocks", "swap_kv_blocks"])
def test_a_destination_that_requires_grad_is_refused(op, kind):
    src, leaf = torch.ones(4, 2), torch.zeros(4, 2, requires_grad=True)
    dst = {"leaf": leaf, "view": leaf[:], "computed": leaf * 2}[kind]
    mapping, ids = torch.tensor([[0, 1]]), torch.tensor([1])

    def write(dst):
        if op == "swap_blocks":
            ops.swap_blocks(src, dst, 8, mapping)
        else:
            ops.swap_kv_blocks([src, src], [src.clone(), dst], ids, ids)

    name, version = "dst" if op == "swap_blocks" else "dst[1]", dst._version
    assert message_of(lambda: write(dst)) == (
        f"torch_kvswap::{op}: {name} requires grad, but the op has no gradient; call it under "
        f"torch.no_grad(), or pass {name}.detach()"
    )
    assert not dst.any()
    assert dst._version == version  # a backward pass may still use it
    with torch.no_grad():
        write(dst)
    assert dst[1].tolist() == [1, 1]
    dst.detach().zero_()
    write(dst.detach())
    assert dst[1].tolist() == [1, 1]


def test_compiled_writes_refuse_what_requires_grad():
    dst = torch.zeros(4, 2, requires_grad=True)
    torch.compiler.reset()
    step = torch.compile(ops.swap_blocks, backend="aot_eager")
    with pytest.raises(RuntimeError, match="swap_blocks: dst requires grad, but the op"):
        step(torch.ones(4, 2), dst, 8, torch.tensor([[0, 1]]))
    assert not dst.any()


@pytest.mark.parametrize("strict", [True, False])
def test_exported_programs_contain_the_tensor_ops(strict):
    class Step(torch.nn.Module):
        def forward(self, src, dst, mapping, ids):
            ops.swap_blocks(src, dst, 8, mapping)
            ops.swap_kv_blocks([src], [dst], ids, ids)
            return dst.sum()

    src, mapping, ids = torch.ones(4, 2), torch.tensor([[0, 1]]), torch.tensor([3])
    program = torch.export.export(
        Step(), (src, torch.zeros(4, 2), mapping, ids), strict=strict
    ).module()
    dst = torch.zeros(4, 2)
    assert float(program(src, dst, mapping, ids)) == 4
    assert dst.tolist() == [[0, 0], [1, 1], [0, 0], [1, 1]]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_inference_tensors_are_written_in_every_mode(device, mode):
    with torch.inference_mode():
        src, dst = torch.ones(4, 2, device=device), torch.zeros(4, 2, device=device)
        out = torch.zeros(2, dtype=torch.int64)
    plain, mapping = torch.zeros(4, 2, device=device), torch.tensor([[0, 1]])
    with mode():
        ops.swap_blocks(src, dst, 8, mapping)
        ops.swap_kv_blocks([src, src], [plain, dst], torch.tensor([0]), torch.tensor([3]))
        ops.expand_block_ids(torch.tensor([3]), 2, out=out)
    assert dst.tolist() == [[0, 0], [1, 1], [0, 0], [1, 1]]
    assert plain.tolist() == [[0, 0], [0, 0], [0, 0], [1, 1]]
    assert out.tolist() == [6, 7]


def test_a_meta_tensor_among_real_ones_is_refused():
    src, dst, mapping = torch.ones(4, 2), torch.zeros(4, 2), torch.tensor([[0, 1]])
    for op, call in (
        ("swap_blocks", lambda: ops.swap_blocks(src, dst, 8, mapping.to("meta"))),
        ("swap_blocks", lambda: ops.swap_blocks(src.to("meta"), dst, 8, mapping)),
        (
            "swap_kv_blocks",
            lambda: ops.swap_kv_blocks([src], [dst.to("meta")], mapping[:, 0], mapping[:, 1]),
        ),
    ):
        assert message_of(call) == (
            f"torch_kvswap::{op}: some operands are meta tensors and some are not; expected all or "
            "none"
        )
    ops.swap_blocks(src.to("meta"), dst.to("meta"), 8, mapping.to("meta"))
    assert not dst.any()


def test_addresses_of_another_device_are_refused(monkeypatch):
    src, dst, size = torch.ones(4), torch.zeros(4), torch.tensor([16])
    addresses = [torch.tensor([tensor.data_ptr()]) for tensor in (src, dst)]
    for accelerator in (None, torch.device("cuda")):
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: accelerator)  # noqa: B023
        ops.swap_blocks_batch(*addresses, size)
        assert dst.tolist() == [1] * 4
        dst.zero_()
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("xpu"))
    assert message_of(lambda: ops.swap_blocks_batch(*addresses, size)) == (
        "torch_kvswap::swap_blocks_batch: the accelerator of this process is xpu, whose addresses "
        "only torch knows; use swap_blocks or swap_kv_blocks, which take tensors of any device"
    )
    assert not dst.any()


def test_empty_copies_may_have_any_addresses():
    src, dst = torch.arange(1.0, 5), torch.zeros(4)
    addresses = [
        torch.tensor([0, *range(t.data_ptr(), t.data_ptr() + 16, 4), -64]) for t in (src, dst)
    ]
    ops.swap_blocks_batch(*addresses, torch.tensor([0, 4, 0, 4, 4, 0]))
    assert dst.tolist() == [1, 0, 3, 4]
