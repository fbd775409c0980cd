"""A plan has the address of every byte that is to move, or says which id is wrong."""

import numpy as np
import pytest
import torch
from expecttest import assert_expected_inline
from hypothesis import given, settings
from hypothesis import strategies as st
from refusal import refusal

from torch_kvswap.host_memory import HostPool
from torch_kvswap.layout import PagedLayout
from torch_kvswap.plan import plan_load, plan_store


def make_pair(blocks_per_page: int = 1, num_pages: int = 4) -> tuple[PagedLayout, HostPool]:
    cache = torch.zeros(2, 6, 5, dtype=torch.int16)
    layout = PagedLayout([cache], block_dim=1)
    return layout, HostPool(layout, num_pages, blocks_per_page)


def test_a_store_goes_from_each_plane_of_a_block_to_its_page() -> None:
    gpu, host = make_pair()
    (cache,) = gpu.tensors
    plan = plan_store(gpu, host, [5, 2], [0, 3])
    sources = [cache[plane, block].data_ptr() for block in (5, 2) for plane in (0, 1)]
    start = host.pages.data_ptr()
    assert plan.src_ptrs.tolist() == sources
    assert plan.dst_ptrs.tolist() == [start, start + 10, start + 60, start + 70]
    assert plan.sizes.tolist() == [10] * 4
    assert plan.nbytes == 40


def test_a_load_is_the_store_with_its_ends_swapped() -> None:
    gpu, host = make_pair(blocks_per_page=3)
    store = plan_store(gpu, host, [5, 2, 0, 1], [3, 1], first_block=1)
    load = plan_load(gpu, host, [5, 2, 0, 1], [3, 1], first_block=1)
    assert torch.equal(store.src_ptrs, load.dst_ptrs)
    assert torch.equal(store.dst_ptrs, load.src_ptrs)
    assert torch.equal(store.sizes, load.sizes)


def test_the_lists_are_what_the_copy_takes() -> None:
    gpu, host = make_pair()
    plan = plan_load(gpu, host, [1], [2])
    for tensor in (plan.src_ptrs, plan.dst_ptrs, plan.sizes):
        assert (tensor.dtype, tensor.device.type, tensor.dim()) == (torch.int64, "cpu", 1)
        assert tensor.is_contiguous()


@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_block_j_lies_in_its_slot_of_its_page(data: st.DataObject) -> None:
    per_page = data.draw(st.integers(1, 5))
    gpu, host = make_pair(blocks_per_page=per_page, num_pages=7)
    blocks = data.draw(st.lists(st.integers(0, 5), unique=True, max_size=6))
    first = data.draw(st.integers(0, per_page - 1))
    slots = [divmod(first + j, per_page) for j in range(len(blocks))]
    pages = data.draw(st.permutations(range(7)))[: slots[-1][0] + 1 if slots else 0]
    plan = plan_store(gpu, host, blocks, pages, first)
    destinations = [host.pages[pages[page], slot].data_ptr() for page, slot in slots]
    assert plan.dst_ptrs[::2].tolist() == destinations
    assert plan.dst_ptrs[1::2].tolist() == [address + 10 for address in destinations]


def test_no_blocks_make_an_empty_plan() -> None:
    gpu, host = make_pair(blocks_per_page=3)
    assert plan_store(gpu, host, [], []).src_ptrs.shape == (0,)
    assert plan_load(gpu, host, torch.empty(0, dtype=torch.int32), []).nbytes == 0


@pytest.mark.parametrize(
    "ids",
    [
        [4, 0],
        (4, 0),
        range(4, -1, -4),
        np.array([4, 0], np.uint8),
        np.array([4, 9, 0])[::2],
        torch.tensor([4, 0]),
        torch.tensor([4, 0], dtype=torch.uint8),
        torch.tensor([[4, 9], [0, 9]], dtype=torch.int32)[:, 0],
    ],
    ids=str,
)
def test_ids_may_be_of_any_integer_kind(ids: object) -> None:
    gpu, host = make_pair()
    assert torch.equal(
        plan_store(gpu, host, ids, [1, 2]).src_ptrs,
        plan_store(gpu, host, [4, 0], [1, 2]).src_ptrs,
    )


def test_ids_may_be_read_only_or_reversed() -> None:
    gpu, host = make_pair()
    pages = np.array([3, 1])
    pages.flags.writeable = False
    blocks = np.arange(6)[::-4]
    plan = plan_store(gpu, host, blocks, pages)
    assert torch.equal(plan.src_ptrs, plan_store(gpu, host, [5, 1], pages[::-1]).src_ptrs)
    assert torch.equal(plan.dst_ptrs, plan_store(gpu, host, [0, 2], [3, 1]).dst_ptrs)


def test_ids_that_change_after_the_plan_change_nothing() -> None:
    gpu, host = make_pair()
    blocks, pages = torch.tensor([4, 0]), np.array([1, 2])
    plan = plan_store(gpu, host, blocks, pages)
    before = plan.src_ptrs.tolist(), plan.dst_ptrs.tolist()
    blocks.fill_(3)
    pages.fill(3)
    assert (plan.src_ptrs.tolist(), plan.dst_ptrs.tolist()) == before


def test_a_load_may_read_a_page_twice_and_a_store_a_block() -> None:
    gpu, host = make_pair()
    assert plan_load(gpu, host, [0, 1], [2, 2]).nbytes == 40
    assert plan_store(gpu, host, [1, 1], [2, 3]).nbytes == 40


@pytest.mark.parametrize("plan", [plan_store, plan_load])
def test_ids_just_out_of_range_are_refused_and_the_last_ones_taken(plan: object) -> None:
    gpu, host = make_pair()
    assert plan(gpu, host, [5], [3]).nbytes == 20
    for blocks, pages in [([6], [3]), ([5], [4]), ([-1], [3]), ([5], [-1])]:
        with pytest.raises(IndexError):
            plan(gpu, host, blocks, pages)


def test_ids_that_no_int64_holds_are_refused() -> None:
    gpu, host = make_pair()
    with pytest.raises(IndexError, match="18446744073709551615"):
        plan_store(gpu, host, np.array([2**64 - 1], np.uint64), [0])


@pytest.mark.gpu
def test_ids_on_the_gpu_are_refused() -> None:
    gpu, host = make_pair()
    with pytest.raises(ValueError, match=r"page_ids is on cuda:0.*pass page_ids\.cpu\(\)"):
        plan_store(gpu, host, [0], torch.tensor([0], device="cuda:0"))


def test_an_id_beyond_the_gpu_blocks_is_refused() -> None:
    gpu, host = make_pair()
    assert_expected_inline(
        refusal(plan_store, gpu, host, [0, 6], [0, 1]),
        """IndexError: gpu_block_ids[1] is 6; there are 6 GPU blocks, 0 to 5""",
    )


def test_a_negative_page_is_refused() -> None:
    gpu, host = make_pair()
    assert_expected_inline(
        refusal(plan_load, gpu, host, [0, 1, 2], [0, -1, 9]),
        """IndexError: page_ids[1] is -1; there are 4 host pages, 0 to 3""",
    )


def test_a_page_that_is_stored_to_twice_is_refused() -> None:
    gpu, host = make_pair()
    assert_expected_inline(
        refusal(plan_store, gpu, host, [0, 1, 2, 3], [1, 3, 2, 3]),
        """\
ValueError: page_ids[1] and page_ids[3] are both 3: it would be written twice; pass each
destination once""",
    )


def test_a_block_that_is_loaded_to_twice_is_refused() -> None:
    gpu, host = make_pair()
    assert_expected_inline(
        refusal(plan_load, gpu, host, [4, 0, 0, 4], [0, 1, 2, 3]),
        """\
ValueError: gpu_block_ids[1] and gpu_block_ids[2] are both 0: it would be written twice;
pass each destination once""",
    )


def test_too_few_pages_are_refused() -> None:
    gpu, host = make_pair(blocks_per_page=2)
    assert_expected_inline(
        refusal(plan_store, gpu, host, [0, 1], [0], first_block=1),
        """ValueError: 2 blocks from first_block=1 on need 2 pages of 2 blocks, page_ids has 1""",
    )


def test_too_many_pages_are_refused() -> None:
    gpu, host = make_pair(blocks_per_page=2)
    assert_expected_inline(
        refusal(plan_store, gpu, host, [0, 1], [0, 1]),
        """ValueError: 2 blocks from first_block=0 on need 1 pages of 2 blocks, page_ids has 2""",
    )


def test_a_first_block_beyond_the_page_is_refused() -> None:
    gpu, host = make_pair(blocks_per_page=2)
    assert_expected_inline(
        refusal(plan_load, gpu, host, [0], [0], first_block=2),
        """ValueError: first_block=2 is outside of the first page, whose blocks are 0 to 1""",
    )


def test_ids_with_a_fraction_are_refused() -> None:
    gpu, host = make_pair()
    assert_expected_inline(
        refusal(plan_store, gpu, host, [0.0], [0]),
        """TypeError: gpu_block_ids is of float64; ids must be integers""",
    )


def test_masks_are_refused() -> None:
    gpu, host = make_pair()
    assert_expected_inline(
        refusal(plan_store, gpu, host, torch.tensor([True]), [0]),
        """TypeError: gpu_block_ids is of bool; ids must be integers""",
    )


def test_ids_in_two_dimensions_are_refused() -> None:
    gpu, host = make_pair()
    assert_expected_inline(
        refusal(plan_load, gpu, host, [[0, 1]], [0, 1]),
        """ValueError: gpu_block_ids has shape [1, 2]; it must have one dimension""",
    )


def test_a_single_number_is_refused() -> None:
    gpu, host = make_pair()
    assert_expected_inline(
        refusal(plan_load, gpu, host, [0], 0),
        """TypeError: page_ids is a int; pass a list, numpy array or CPU tensor""",
    )


def test_an_empty_array_of_floats_is_refused() -> None:
    gpu, host = make_pair()
    assert_expected_inline(
        refusal(plan_load, gpu, host, np.zeros(0), []),
        """TypeError: gpu_block_ids is of float64; ids must be integers""",
    )


def test_ids_that_are_no_list_of_integers_are_refused() -> None:
    gpu, host = make_pair()
    calls = [
        lambda: plan_store(gpu, host, {0, 1}, [0]),  # type: ignore[arg-type]
        lambda: plan_store(gpu, host, [[0], [0, 1]], [0]),  # type: ignore[list-item]
        lambda: plan_store(gpu, host, torch.zeros(1, dtype=torch.bfloat16), [0]),
        lambda: plan_store(gpu, host, [0], [0], first_block=0.0),  # type: ignore[arg-type]
    ]
    assert_expected_inline(
        "\n".join(refusal(call) for call in calls),
        """\
TypeError: gpu_block_ids is a set; pass a list, numpy array or CPU tensor
ValueError: gpu_block_ids must have one dimension: setting an array element with a
sequence. The requested array has an inhomogeneous shape after 1 dimensions. The
detected shape was (2,) + inhomogeneous part.
TypeError: gpu_block_ids is of torch.bfloat16; ids must be integers
TypeError: 'float' object cannot be interpreted as an integer""",
    )
