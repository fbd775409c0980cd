"""Block j of a request goes to its slot of its page; errors name the invalid id."""

from __future__ import annotations

import torch
from error_text import error_text
from expecttest import assert_expected_inline

from torch_kvswap.host_pool.pool import HostPool
from torch_kvswap.layout import PagedLayout
from torch_kvswap.offload.handler import OffloadHandler

BLOCKS = 6


def make_handler(per_page: int = 1, num_pages: int = 4) -> OffloadHandler:
    cache = torch.randint(-999, 999, (2, BLOCKS, 5), dtype=torch.int16)
    layout = PagedLayout([cache], block_dim=1)
    return OffloadHandler(layout, HostPool(layout, num_pages, per_page))


def make_hybrid() -> OffloadHandler:
    """Two groups: 6 blocks in 4 pages of 2, and 3 blocks in 5 pages of 1."""
    layouts = [PagedLayout([torch.zeros(6, 4)]), PagedLayout([torch.zeros(3, 8)])]
    return OffloadHandler(layouts, [HostPool(layouts[0], 4, 2), HostPool(layouts[1], 5)])


def test_sources_may_repeat_in_a_job() -> None:
    with make_handler() as handler:
        assert handler.load(page_ids=[2, 2], gpu_block_ids=[0, 1]).nbytes == 40
        assert handler.store(gpu_block_ids=[1, 1], page_ids=[2, 3]).nbytes == 40


def test_a_wrong_request_says_what_is_wrong() -> None:
    handler, pairs = make_handler(), make_handler(per_page=2)
    calls = [
        lambda: handler.store(gpu_block_ids=[0, 6], page_ids=[0, 1]),
        lambda: handler.load(page_ids=[0, -1, 9], gpu_block_ids=[0, 1, 2]),
        lambda: handler.store(gpu_block_ids=[0, 1, 2, 3], page_ids=[1, 3, 2, 3]),
        lambda: handler.load(page_ids=[0, 1, 2, 3], gpu_block_ids=[4, 0, 0, 4]),
        lambda: pairs.store(gpu_block_ids=[0, 1], page_ids=[0], first_slot=1),
        lambda: pairs.store(gpu_block_ids=[0, 1], page_ids=[0, 1]),
        lambda: pairs.load(page_ids=[0], gpu_block_ids=[0], first_slot=2),
        lambda: pairs.load(page_ids=[0], gpu_block_ids=[0], first_slot=-1),
        lambda: pairs.load(page_ids=[0], gpu_block_ids=[0], first_slot=0.0),  # type: ignore[arg-type]
        lambda: handler.load(page_ids=[0], gpu_block_ids=[0], layer_groups=0),
        lambda: handler.load(page_ids=[0], gpu_block_ids=[0], layer_groups=2),
    ]
    assert_expected_inline(
        "\n".join(error_text(call) for call in calls),
        """\
IndexError: gpu_block_ids[1] is 6; there are 6 GPU blocks, 0 to 5
IndexError: page_ids[1] is -1; there are 4 host pages, 0 to 3
ValueError: page_ids[1] and page_ids[3] are both 3: it would be written twice; pass each
destination once
ValueError: gpu_block_ids[1] and gpu_block_ids[2] are both 0: it would be written twice;
pass each destination once
ValueError: page_ids has 1 page of 2 blocks; for 2 blocks from first_slot=1 on, pass 2
pages
ValueError: page_ids has 2 pages of 2 blocks; for 2 blocks from first_slot=0 on, pass 1
page
ValueError: first_slot=2 is not a slot of the first page: with blocks_per_page=2 a page
has slots 0 to 1
ValueError: first_slot=-1 is not a slot of the first page: with blocks_per_page=2 a page
has slots 0 to 1
TypeError: first_slot is a float; it must be an integer
ValueError: layer_groups is 0; it must be 1
ValueError: layer_groups is 2; it must be 1""",
    )
    assert handler.poll() == []
    assert handler.store(gpu_block_ids=[0], page_ids=[0]).id == 0


def test_a_wrong_request_names_its_group() -> None:
    handler = make_hybrid()
    calls = [
        lambda: handler.store(gpu_block_ids=[[0], [3]], page_ids=[[0], [0]]),
        lambda: handler.store(gpu_block_ids=[[0], [2]], page_ids=[[4], [0]]),
        lambda: handler.store(gpu_block_ids=[[0], [1, 2]], page_ids=[[0], [3, 3]]),
        lambda: handler.load(page_ids=[[0], [1, 2]], gpu_block_ids=[[0], [2, 2]]),
        lambda: handler.store(gpu_block_ids=[[0], [1]], page_ids=[[0], []]),
        lambda: handler.store(gpu_block_ids=[0], page_ids=[0]),
        lambda: handler.store(gpu_block_ids=[[0]], page_ids=[[0]]),
        lambda: handler.store(gpu_block_ids=[[0], 1], page_ids=[[0], [1]]),
        lambda: handler.store(gpu_block_ids=[[0], [1]], page_ids=[[0], [1]], first_slot=[0, 1]),
        lambda: handler.store(gpu_block_ids=[[0], [1]], page_ids=[[0], [1]], first_slot=[0]),
    ]
    assert_expected_inline(
        "\n".join(error_text(call) for call in calls),
        """\
IndexError: gpu_block_ids[1][0] is 3; there are 3 GPU blocks, 0 to 2
IndexError: page_ids[0][0] is 4; there are 4 host pages, 0 to 3
ValueError: page_ids[1][0] and page_ids[1][1] are both 3: it would be written twice;
pass each destination once
ValueError: gpu_block_ids[1][0] and gpu_block_ids[1][1] are both 2: it would be written
twice; pass each destination once
ValueError: page_ids[1] has 0 pages of 1 block; for 1 block from first_slot=0 on, pass 1
page
ValueError: gpu_block_ids has 1 item for 2 groups; pass one for each group, an empty one
for a group without blocks
ValueError: gpu_block_ids has 1 item for 2 groups; pass one for each group, an empty one
for a group without blocks
TypeError: gpu_block_ids[1] is an int; this handler has 2 groups: pass a list, numpy
array or CPU tensor for each
ValueError: first_slot[1]=1 is not a slot of the first page: with blocks_per_page=1 a
page has slot 0 only
ValueError: first_slot has length 1; this handler has 2 groups: pass a number for each,
or one for all""",
    )
    assert handler.poll() == []


def test_groups_of_one_memory_write_blocks_once() -> None:
    cache = torch.zeros(4, 6)
    layouts = [PagedLayout([cache]), PagedLayout([cache])]
    pool = HostPool(layouts[0], 4)
    with OffloadHandler(layouts, [pool, pool]) as handler:
        calls = [
            lambda: handler.load(page_ids=[[0], [1]], gpu_block_ids=[[2], [2]]),
            lambda: handler.store(gpu_block_ids=[[0], [1, 3]], page_ids=[[2], [1, 2]]),
        ]
        assert_expected_inline(
            "\n".join(error_text(call) for call in calls),
            """\
ValueError: gpu_block_ids[1][0] is 2, which another group of this job writes too; their
memory is the same
ValueError: page_ids[1][1] is 2, which another group of this job writes too; their
memory is the same""",
        )
        assert handler.load(page_ids=[[0], [1]], gpu_block_ids=[[2], [3]]).nbytes == 48
