"""A handler takes layouts and pools that fit together."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from error_text import error_text, one_line
from expecttest import assert_expected_inline

from torch_kvswap.host_pool.pool import HostPool
from torch_kvswap.layout import PagedLayout
from torch_kvswap.offload.groups import Groups
from torch_kvswap.offload.handler import OffloadHandler


def layout(*sizes: int, blocks: int = 4) -> PagedLayout:
    return PagedLayout([torch.zeros(blocks, size) for size in sizes])


def of_type(dtype: torch.dtype) -> PagedLayout:
    return PagedLayout([torch.zeros(4, 8192 // dtype.itemsize, dtype=dtype)])


def test_layers_are_counted_through_all_groups() -> None:
    layouts = [layout(6, 6), PagedLayout([torch.zeros(2, 4, 3)], block_dim=1)]
    groups = Groups(layouts, [HostPool(layouts[0], 2), HostPool(layouts[1], 3, 2)])
    assert (groups.is_list, groups.num_layers) == (True, 3)
    with OffloadHandler(layouts, list(groups.pools)) as handler:
        job = handler.load(page_ids=[[], []], gpu_block_ids=[[], []], layer_groups=3)
        assert [job.layer_group_of(layer) for layer in range(3)] == [0, 1, 2]


@pytest.mark.parametrize(("shape", "dim"), [((2, 6, 5, 4), 1), ((6, 2, 5, 4), 0), ((6, 5, 4), 0)])
def test_layer_groups_of_one_tensor_are_refused(shape: tuple[int, ...], dim: int) -> None:
    kv, block_dim = torch.zeros(shape), len(shape) - 2
    gpu = PagedLayout([kv], block_dim)
    with OffloadHandler(gpu, HostPool(gpu, 2)) as handler:
        load = partial(handler.load, page_ids=[0], gpu_block_ids=[0], layer_groups=6)
        said = one_line(load)
    assert said == (
        "ValueError: layer_groups is 6; it must be 1, because a tensor counts as one layer: "
        f"if kv of shape {list(shape)} has 6 layers, make the layout of kv.unbind({dim}) with "
        f"block_dim={block_dim - 1}"
    )
    gpu = PagedLayout(kv.unbind(dim), block_dim - 1)
    with OffloadHandler(gpu, HostPool(gpu, 2)) as handler:
        handler.load(page_ids=[0], gpu_block_ids=[0], layer_groups=6).synchronize()


def test_groups_share_pages_and_blocks_as_memory() -> None:
    one, other = layout(6), layout(6)
    pool, second = HostPool(one, 2), HostPool(one, 2)
    groups = Groups([one, other, one], [pool, pool, second])
    blocks = [group.block_space for group in groups.layouts_for_native]
    slots = [group.slot_space for group in groups.layouts_for_native]
    assert blocks[0] == blocks[2] != blocks[1]
    assert slots[0] == slots[1] != slots[2]


def test_what_does_not_belong_together_is_refused() -> None:
    one, two, other = layout(6), layout(6, 6), layout(6, 5)
    pool = HostPool(one, 1)
    calls = [
        lambda: Groups(pool, one),  # type: ignore[arg-type]
        lambda: Groups(list(one.tensors), pool),  # type: ignore[arg-type]
        lambda: Groups(one.tensors[0], pool),  # type: ignore[arg-type]
        lambda: Groups([one], pool),
        lambda: Groups(one, [pool, pool]),
        lambda: Groups([], []),
        lambda: Groups([one, one], [pool]),
        lambda: Groups([one], []),
        lambda: Groups(two, pool),
        lambda: Groups(other, HostPool(layout(6, 7), 1)),
        lambda: Groups([one, two], [pool, pool]),
    ]
    assert_expected_inline(
        "\n".join(error_text(call) for call in calls),
        """\
TypeError: a handler takes a PagedLayout and a HostPool, in this order, or a list of
each; got a HostPool instead of a PagedLayout
TypeError: gpu is a list of 1 Tensor; pass PagedLayout(tensors)
TypeError: gpu is a Tensor; pass PagedLayout([tensor])
TypeError: gpu is a list of 1 PagedLayout, host is a HostPool; pass one of each, or a
list of each
TypeError: gpu is a PagedLayout, host is a list of 2 HostPools; pass one of each, or a
list of each
ValueError: 0 layouts and 0 host pools: each layout needs one pool
ValueError: 2 layouts and 1 host pool: each layout needs one pool
ValueError: 1 layout and 0 host pools: each layout needs one pool
ValueError: the cache does not fit the host pool: number of tensors: 2 in the cache, 1
in the host pool; make the pool from this layout
ValueError: the cache does not fit the host pool: tensors[1]: float32 [blocks, 5] in the
cache, float32 [blocks, 7] in the host pool; make the pool from this layout
ValueError: gpu[1] does not fit host[1]: number of tensors: 2 in gpu[1], 1 in host[1];
make host[1] from gpu[1]""",
    )


def test_errors_of_several_groups_name_the_group() -> None:
    one, two = layout(6), layout(6, 6)
    pools = [HostPool(one, 1), HostPool(two, 1)]
    groups = Groups([one, two], pools)
    elsewhere, halves = layout(6), of_type(torch.float16)
    elsewhere.device = torch.device("cuda", 1)
    encoded = HostPool(of_type(torch.bfloat16), 1, encoding="lossless")
    calls = [
        lambda: Groups([one, two], [pools[0], pools[0]]),
        lambda: Groups([one, two], [pools[0], HostPool(layout(6, 7), 1)]),
        lambda: Groups([one, elsewhere], pools),
        lambda: Groups([elsewhere], pools[:1]),
        lambda: Groups([one, halves], [pools[0], encoded]),
        lambda: groups.moved_to([one, layout(6, 7)]),
        lambda: groups.moved_to([one, layout(6)]),
        lambda: groups.moved_to([elsewhere, two]),
    ]
    assert_expected_inline(
        "\n".join(error_text(call) for call in calls),
        """\
ValueError: gpu[1] does not fit host[1]: number of tensors: 2 in gpu[1], 1 in host[1];
make host[1] from gpu[1]
ValueError: gpu[1] does not fit host[1]: tensors[1]: float32 [blocks, 6] in gpu[1],
float32 [blocks, 7] in host[1]; make host[1] from gpu[1]
ValueError: gpu[0] is on cpu, gpu[1] on cuda:1; make a handler for each device
ValueError: the cache is on cuda:1, the host pool was made for cpu; make the pool from
this layout
ValueError: encoding='lossless' is for torch.bfloat16, but gpu[1] is of torch.float16;
make host[1] from gpu[1] with encoding='raw'
ValueError: gpu[1] does not fit host[1]: tensors[1]: float32 [blocks, 7] in gpu[1],
float32 [blocks, 6] in host[1]; make host[1] from gpu[1]
ValueError: gpu[1] does not fit host[1]: number of tensors: 1 in gpu[1], 2 in host[1];
make host[1] from gpu[1]
ValueError: gpu[0] is on cuda:1, host[0] was made for cpu; make host[0] from gpu[0]""",
    )


def test_a_moved_tensor_is_named_with_its_group() -> None:
    one, two = layout(6), layout(6, 6)
    groups = Groups([one, two], [HostPool(one, 1), HostPool(two, 1)])
    two.tensors[1].set_(torch.zeros(4, 6))
    with pytest.raises(RuntimeError, match=r"^gpu\[1\]\.tensors\[1\] has moved from 0x"):
        groups.guard.check()
