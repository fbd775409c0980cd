"""A layout has the address of every block of every slab; errors name the tensor."""

import copy
from collections import Counter
from random import Random

import pytest
import torch
from error_text import error_text
from expecttest import assert_expected_inline
from torch import Tensor
from torch._subclasses import FakeTensorMode

from torch_kvswap.layout import PagedLayout, layout_like


def block_bytes_of(layout: PagedLayout, slab: int, block: int) -> int:
    return int(layout.bases[slab] + block * layout.strides[slab])


def test_k_and_v_split_makes_two_slabs() -> None:
    cache = torch.zeros(2, 5, 4, 3, dtype=torch.bfloat16)
    layout = PagedLayout([cache, cache.clone()], block_dim=1)
    assert (len(layout.bases), layout.num_blocks, layout.block_bytes) == (4, 5, 4 * 24)
    assert layout.sizes.tolist() == [24] * 4
    for slab in range(2):
        for block in range(5):
            assert block_bytes_of(layout, slab, block) == cache[slab, block].data_ptr()


def test_a_dimension_of_two_must_be_named() -> None:
    cache = torch.zeros(2, 9, 4, 3)
    assert_expected_inline(
        error_text(PagedLayout, [cache]),
        """\
ValueError: tensors[0] has shape [2, 9, 4, 3], which can be keys and values of 9 blocks,
or 2 blocks; pass block_dim=1 or block_dim=0""",
    )
    assert PagedLayout([cache], 0).num_blocks == 2
    assert PagedLayout([cache], 1).num_blocks == 9
    assert PagedLayout([torch.zeros(2, 576)]).num_blocks == 2  # rows


def test_every_slab_knows_its_tensor() -> None:
    tensors = [torch.zeros(2, 5, 3), torch.zeros(1, 5, 4), torch.zeros(3, 5, 2)]
    layout = PagedLayout(tensors, block_dim=1)
    assert layout._tensor_of_slab.tolist() == [0, 0, 1, 2, 2, 2]
    for base, tensor in zip(layout.bases, layout._tensor_of_slab, strict=True):
        begin = tensors[tensor].data_ptr()
        assert begin <= base < begin + tensors[tensor].nbytes


def test_a_single_block_has_any_stride() -> None:
    cache = torch.zeros(100).as_strided((1, 10), (1, 1))
    assert PagedLayout([cache]).num_blocks == 1


def test_tensors_that_make_no_layout_are_refused() -> None:
    zeros = torch.zeros
    with FakeTensorMode():
        fake = zeros(3, 4)
    cases: list[tuple[list[Tensor], int | None]] = [
        ([], 0),
        ([zeros(3, 4)], 2),
        ([zeros(3, 4)], -1),
        ([zeros(3, 4), zeros(3, 4, device="meta")], 0),
        ([zeros(3, 4, device="meta") for _ in range(2)], None),
        ([fake], 0),
        ([zeros(3, 4), zeros(2, 4)], 0),
        ([zeros(3, 4), zeros(3, 0)], 0),
        ([zeros(3, 4, 8)[:, :, :5]], 0),
        ([zeros(1, 4).expand(3, 4)], 0),
        ([zeros(100).as_strided((3, 4, 8), (8, 16, 1))], 1),
        ([zeros(100).as_strided((2, 5, 8), (4, 8, 1))], 1),
    ]
    errors = [error_text(PagedLayout, tensors, block_dim=dim) for tensors, dim in cases]
    assert_expected_inline(
        "\n".join(errors),
        """\
ValueError: tensors is empty; a layout needs at least one tensor
ValueError: tensors[0] (shape [3, 4], strides [4, 1], torch.float32, cpu) has no
dimension block_dim=2; name the dimension that counts blocks, 0 to 1
ValueError: tensors[0] (shape [3, 4], strides [4, 1], torch.float32, cpu) has no
dimension block_dim=-1; name the dimension that counts blocks, 0 to 1
ValueError: tensors[1] (shape [3, 4], strides [4, 1], torch.float32, meta) is on another
device than tensors[0] (cpu); make a layout for each device
ValueError: tensors[0] (shape [3, 4], strides [4, 1], torch.float32, meta) has no memory
(on meta, or fake); pass tensors of a device or of the CPU
ValueError: tensors[0] (shape [3, 4], strides [4, 1], torch.float32, cpu) has no memory
(on meta, or fake); pass tensors of a device or of the CPU
ValueError: tensors[1] (shape [2, 4], strides [4, 1], torch.float32, cpu) has 2 blocks
in dimension 0, tensors[0] has 3; check block_dim, or make a layout for each size
ValueError: tensors[1] (shape [3, 0], strides [1, 1], torch.float32, cpu) holds no
bytes; leave it out
ValueError: tensors[0] (shape [3, 4, 5], strides [32, 8, 1], torch.float32, cpu) is not
dense within a block (the dimensions after block_dim=0); make it contiguous, or put the
dimension with the gaps before block_dim
ValueError: tensors[0] (shape [3, 4], strides [0, 1], torch.float32, cpu) has blocks
that overlap: they are 0 elements apart, but 4 long; copy it to memory of its own (an
expanded tensor needs .contiguous())
ValueError: tensors[0] (shape [3, 4, 8], strides [8, 16, 1], torch.float32, cpu) has
blocks that overlap: they are 16 elements apart, but 24 long; copy it to memory of its
own (an expanded tensor needs .contiguous())
ValueError: tensors[0] (shape [2, 5, 8], strides [4, 8, 1], torch.float32, cpu) has
blocks that overlap: they are 4 elements apart, but 8 long; copy it to memory of its own
(an expanded tensor needs .contiguous())""",
    )


@pytest.mark.parametrize("left", [0, 16, 47])
def test_a_freed_or_smaller_storage_is_refused(left: int) -> None:
    tensor = torch.zeros(3, 4)
    tensor.untyped_storage().resize_(left)

    def make() -> PagedLayout:  # pytest cannot print such a tensor when this fails
        return PagedLayout([torch.zeros(3, 4), tensor])

    assert_expected_inline(
        error_text(make).replace(f"to {left}:", "to N:"),
        """\
ValueError: tensors[1] (shape [3, 4], strides [4, 1], torch.float32, cpu) reaches to
byte 48 of its storage, which was freed or resized to N: bring its memory back first""",
    )


def test_slabs_share_bytes_as_their_bytes_say() -> None:
    """Against every byte, for random rows of one storage. Rows at other distances than their
    neighbours' may be refused without need, and never accepted when they meet."""
    random, outcomes = Random(0), Counter[tuple[bool, bool]]()
    for _ in range(1000):
        memory = torch.zeros(64, dtype=torch.uint8)
        blocks, strides = random.randint(1, 4), [random.randint(4, 12)] * 4
        is_even = random.random() < 0.7
        tensors, taken, meets = [], set(), False
        for stride in strides if is_even else random.choices(range(4, 13), k=2):
            size = random.randint(1, 4)
            first = random.randint(0, 64 - (blocks - 1) * stride - size)
            tensors.append(memory.as_strided((blocks, size), (stride, 1), first))
            its = {first + b * stride + i for b in range(blocks) for i in range(size)}
            meets |= bool(taken & its)
            taken |= its
        try:
            PagedLayout(tensors)
            is_refused = False
        except ValueError:
            is_refused = True
        assert is_refused == meets or (is_refused and not is_even)
        outcomes[is_even, is_refused] += 1
    assert len(outcomes) == 4
    assert min(outcomes.values()) > 40, outcomes


def test_values_have_the_type_of_their_tensors() -> None:
    halves = [torch.zeros(4, 8, dtype=torch.float16) for _ in range(2)]
    assert PagedLayout(halves).dtype == torch.float16
    assert PagedLayout([*halves, torch.zeros(4, 8)]).dtype is None


def test_bytes_have_the_type_that_the_caller_names() -> None:
    tensors = [torch.zeros(4, 8, dtype=one) for one in (torch.uint8, torch.int8, torch.bfloat16)]
    assert PagedLayout(tensors, dtype=torch.bfloat16).dtype == torch.bfloat16


def test_an_impossible_value_type_is_refused() -> None:
    assert_expected_inline(
        error_text(PagedLayout, [torch.zeros(4, 8)], dtype=torch.bfloat16),
        """\
ValueError: dtype is torch.bfloat16, but tensors[0] is of torch.float32; leave dtype
out, or pass views of the tensors' bytes""",
    )
    odd = [torch.zeros(4, 9, dtype=torch.uint8)]
    assert_expected_inline(
        error_text(PagedLayout, odd, dtype=torch.bfloat16),
        """\
ValueError: dtype is torch.bfloat16, but a block has 9 bytes in tensors[0], which is no
multiple of 2""",
    )
    assert_expected_inline(
        error_text(PagedLayout, odd, dtype="bfloat16"),
        """TypeError: dtype is a str; it must be a torch.dtype, or None""",
    )


def bf16(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


TOKENS_FIRST = "bfloat16 [blocks, 16, 8, 64]"
# Layouts by the description of their only tensor: its bytes in host memory mean the same.
DESCRIBED: dict[str, list[PagedLayout]] = {
    TOKENS_FIRST: [
        PagedLayout([bf16(4, 16, 8, 64)]),
        PagedLayout([bf16(9, 16, 8, 64)]),
        PagedLayout([bf16(5, 3, 16, 8, 64)[:, 1]]),  # blocks lie apart
        PagedLayout([bf16(4, 16, 8, 64).view(torch.uint8)], dtype=torch.bfloat16),
        PagedLayout([bf16(4, 16, 8, 64).view(torch.int8)], dtype=torch.bfloat16),
    ],
    "bfloat16 [blocks, 8, 16, 64]": [PagedLayout([bf16(4, 8, 16, 64)])],
    "bfloat16 [blocks, 4, 16, 128]": [PagedLayout([bf16(4, 4, 16, 128)])],
    f"{TOKENS_FIRST} in the order [0, 2, 1, 3]": [
        PagedLayout([bf16(4, 8, 16, 64).transpose(1, 2)]),
        PagedLayout([bf16(4, 8, 16, 64).view(torch.uint8).transpose(1, 2)], dtype=torch.bfloat16),
    ],
    "bfloat16 [blocks, 16, 1, 64]": [
        PagedLayout([bf16(4, 16, 1, 64)]),
        PagedLayout([bf16(4, 1, 16, 64).transpose(1, 2)]),  # one head has no order
    ],
    "bfloat16 [blocks, 1, 16, 64]": [PagedLayout([bf16(4, 1, 16, 64)])],
    "bfloat16 [2, 5, blocks, 64]": [PagedLayout([bf16(2, 5, 4, 64)], 2)],
    "bfloat16 [5, 2, blocks, 64]": [
        PagedLayout([bf16(5, 2, 4, 64)], 2),
        PagedLayout([bf16(2, 5, 4, 64).transpose(0, 1)], 2),
    ],
    "bfloat16 [blocks, 2, 5, 64]": [PagedLayout([bf16(4, 2, 5, 64)])],
    "float16 [blocks, 64]": [PagedLayout([torch.zeros(4, 64, dtype=torch.float16)])],
    "uint8 [blocks, 128]": [PagedLayout([torch.zeros(4, 128, dtype=torch.uint8)])],
    "uint8 [blocks, 2, 3], bytes of bfloat16": [
        PagedLayout([torch.zeros(4, 2, 3, dtype=torch.uint8)], dtype=torch.bfloat16)
    ],
    "float32 [blocks]": [PagedLayout([torch.zeros(4)])],
}


@pytest.mark.parametrize("text", DESCRIBED)
def test_equal_descriptions_are_of_equal_bytes(text: str) -> None:
    for layout in DESCRIBED[text]:
        assert layout._describe() == [text]


def test_names_and_their_order_are_described() -> None:
    k, v = bf16(4, 8), bf16(4, 8)
    named = PagedLayout({"k": k, "v: 2": v})
    assert named._describe() == ["k: bfloat16 [blocks, 8]", "v: 2: bfloat16 [blocks, 8]"]
    assert PagedLayout({"v: 2": v, "k": k})._describe() == named._describe()[::-1]
    assert PagedLayout([k, v])._describe() == ["bfloat16 [blocks, 8]"] * 2
    for again in (layout_like(named._describe()), copy.copy(named)):
        assert (again.names, again._describe()) == (("k", "v: 2"), named._describe())


@pytest.mark.parametrize("names", [("k: ", "k: "), ("k: ", ""), ("", "k: ")])
def test_descriptions_must_name_each_tensor(names: tuple[str, str]) -> None:
    with pytest.raises(ValueError, match="do not name 2 tensors"):
        layout_like([f"{name}uint8 [blocks, 8]" for name in names])


def test_errors_name_the_tensor_of_a_mapping() -> None:
    k = torch.zeros(4, 8)
    with pytest.raises(ValueError, match=r"tensors\['k'\] and tensors\['v'\] share memory"):
        PagedLayout({"k": k, "v": k})
    with pytest.raises(TypeError, match=r"tensors\['v'\] is a list; it must be a tensor"):
        PagedLayout({"k": k, "v": [k]})  # type: ignore[dict-item]
    with pytest.raises(TypeError, match="tensors has the key 0; its keys must be names"):
        PagedLayout({0: k})  # type: ignore[dict-item]


@pytest.mark.parametrize("text", DESCRIBED)
def test_a_layout_is_made_again_from_its_description(text: str) -> None:
    (one, *_), again = DESCRIBED[text], layout_like([text])
    assert again._describe() == [text]
    assert (again.sizes.tolist(), again.dtype) == (one.sizes.tolist(), one.dtype)


@pytest.mark.parametrize(
    "text",
    ["", "float32", "float32 [4]", "float33 [blocks]", "nn [blocks]", "float32 [blocks, 0]"]
    + [
        f"float32 [blocks, 2, 3] in the order [{order}]" for order in ("0, 1", "0, 1, 1", "0, 1, 3")
    ],
)
def test_what_describes_no_layout_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"does not (describe|order)|is not a type|holds no bytes"):
        layout_like([text])
