"""Every invalid argument of a public call is refused by its name, and leaves nothing behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from error_text import error_text

from torch_kvswap import HostPool, Job, OffloadHandler, PagedLayout, ops
from torch_kvswap.host_pool import PoolHandle
from torch_kvswap.prefix import BlockManager, Stored


def make_layout(tensors: int = 2) -> PagedLayout:
    return PagedLayout([torch.zeros(8, 16, dtype=torch.uint8) for _ in range(tensors)])


def new_handler() -> OffloadHandler:
    layout = make_layout()
    return OffloadHandler(layout, HostPool(layout, 4, blocks_per_page=2))


def stored() -> Job:
    return new_handler().store(gpu_block_ids=[0], page_ids=[0])


@pytest.fixture
def handler() -> OffloadHandler:
    return new_handler()


def is_refused(
    name: str, error: type[Exception], call: Callable[..., object], **given: Any
) -> None:
    with pytest.raises(error, match=rf"\b{name}\b") as raised:
        call(**given)
    assert type(raised.value) is error, raised.value


def make_handle(**given: Any) -> PoolHandle:
    numbers = {"fd": 0, "num_pages": 1, "blocks_per_page": 1, "page_bytes": 1}
    return PoolHandle(**{**numbers, "tensors": [], **given})


def store_hybrid(**given: Any) -> object:
    layouts = [make_layout(), make_layout()]
    hybrid = OffloadHandler(layouts, [HostPool(layout, 4) for layout in layouts])
    return hybrid.store(gpu_block_ids=[[0], [0]], page_ids=[[0], [0]], **given)


# By call: its integers. None means something where a name ends with a question mark.
INTEGERS: list[tuple[Callable[..., object], str]] = [
    (lambda **given: make_pool(**given), "num_pages blocks_per_page"),
    (lambda **given: make_shared_pool(**given), "num_pages blocks_per_page"),
    (lambda **given: PagedLayout([torch.zeros(4, 4)], **given), "block_dim?"),
    (lambda **given: make_handler(**given), "staging_bytes"),
    (lambda **given: load(**given), "first_slot layer_groups?"),
    (lambda **given: stored().wait(**given), "layer_group?"),
    (lambda layer: stored().layer_group_of(layer), "layer"),
    (lambda pages: new_handler().pools[0].wait_ready(0, pages=pages), "pages?"),
    (make_handle, "fd num_pages blocks_per_page page_bytes"),
]


@pytest.mark.parametrize(
    ("call", "name"), [(call, name) for call, names in INTEGERS for name in names.split()]
)
def test_a_wrong_integer_is_refused(call: Callable[..., object], name: str) -> None:
    """All are read by read_int(), of which test_ids.py has the kinds of integers."""
    may_be_none, name = name.endswith("?"), name.rstrip("?")
    for value, error in ((1.5, TypeError), (2**64 + 1, ValueError), (None, TypeError)):
        if value is not None or not may_be_none:
            is_refused(name, error, call, **{name: value})


def test_a_wrong_integer_in_a_list_is_refused() -> None:
    with pytest.raises(TypeError, match=r"^first_slot\[1\] "):
        store_hybrid(first_slot=[0, "1"])


def test_integers_that_are_too_large_are_refused(handler: OffloadHandler) -> None:
    with pytest.raises(ValueError, match=r"num_pages=4611686018427387904.*more than can be"):
        make_pool(num_pages=2**62, blocks_per_page=2)
    with pytest.raises(ValueError, match="staging_bytes"):
        make_handler(staging_bytes=2**64 + 2**20)  # 1 MiB, if it was truncated
    for value in (0, 3, 1 << 31, 1 << 32):
        with pytest.raises(ValueError, match=f"^layer_groups is {value}; it must be 1 to 2$"):
            handler.load(page_ids=[0], gpu_block_ids=[0], layer_groups=value)


def make_pool(**options: Any) -> None:
    HostPool(make_layout(), **{"num_pages": 4, **options})


def make_shared_pool(**options: Any) -> None:
    HostPool(make_layout(), **{"num_pages": 4, "shared": True, **options})


def attach_pool(**options: Any) -> None:
    handle = HostPool(make_layout(), 4, shared=True).share()
    HostPool.attach(make_layout(), handle, **options)


def make_handler(**options: Any) -> None:
    layout = make_layout()
    OffloadHandler(layout, HostPool(layout, 4), **options)


def store(**options: Any) -> None:
    layout = make_layout()
    OffloadHandler(layout, HostPool(layout, 4)).store(gpu_block_ids=[0], page_ids=[0], **options)


def load(**options: Any) -> None:
    layout = make_layout()
    OffloadHandler(layout, HostPool(layout, 4)).load(gpu_block_ids=[0], page_ids=[0], **options)


def order(**options: Any) -> None:
    BlockManager(4).order([bytes(32)], **options)


def lookup(**options: Any) -> None:
    BlockManager(4).lookup([bytes(32)], **options)


SWITCHES = [
    (make_pool, "pin_in_background"),
    (make_shared_pool, "pin_in_background"),
    (attach_pool, "pin_in_background"),
    (make_handler, "submit_thread"),
    (load, "expedited"),
    (lookup, "again"),
    (order, "renew"),
]


@pytest.mark.parametrize("value", ["no", 1, None])
@pytest.mark.parametrize(("call", "name"), SWITCHES)
def test_a_switch_must_be_true_or_false(call: Callable[..., None], name: str, value: Any) -> None:
    expected = f"TypeError: {name} is {value!r}; it must be True or False"
    assert error_text(call, **{name: value}) == expected


def test_a_switch_may_be_numpys_bool(handler: OffloadHandler) -> None:
    handler.load(page_ids=[0], gpu_block_ids=[0], expedited=np.True_)  # type: ignore[arg-type]
    handler.load(page_ids=[0], gpu_block_ids=[0], expedited=np.False_)  # type: ignore[arg-type]
    metrics = handler.metrics()
    assert (metrics.expedited.submitted, metrics.loads.submitted) == (1, 1)


def test_a_wrong_timeout_is_refused(handler: OffloadHandler) -> None:
    handler.store(gpu_block_ids=[0], page_ids=[0])
    for wait in (handler.synchronize, handler.pools[0].wait_ready, handler.poll):
        for value, error in ((float("nan"), ValueError), (-0.5, ValueError), ("1", TypeError)):
            is_refused("timeout", error, lambda value=value, wait=wait: wait(timeout=value))


def test_a_timeout_may_be_longer_than_any_clock(handler: OffloadHandler) -> None:
    job = handler.store(gpu_block_ids=[0], page_ids=[0])
    for timeout in (float("inf"), 1e300, 10**400):
        handler.synchronize(job, timeout=timeout)
        assert handler.pools[0].wait_ready(timeout)


def test_what_is_no_job_is_refused_by_name(handler: OffloadHandler) -> None:
    job, other = (
        handler.store(gpu_block_ids=[0], page_ids=[0]),
        handler.store(gpu_block_ids=[1], page_ids=[1]),
    )
    advice = r"; pass the Job that store\(\) or load\(\) returned$"
    for value in ([job, other], [], None, job.id):
        with pytest.raises(TypeError, match=rf"^job is .*{advice}"):
            handler.cancel(value)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=rf"^jobs\[1\] is None{advice}"):
        handler.synchronize([job, None])  # type: ignore[list-item]
    for value, kind in (("job", "a str"), (5, "an int"), (Stored("storing", job), "a Stored")):
        with pytest.raises(TypeError, match=rf"^jobs is {kind}; pass (the Job|its job)"):
            handler.synchronize(value)  # type: ignore[arg-type]
    handler.synchronize(iter([job, other]))


def test_a_job_is_made_by_a_handler_only() -> None:
    for given in ((), (5,)):
        with pytest.raises(
            TypeError, match=r"^a Job cannot be made; store\(\) and load\(\) return"
        ):
            Job(*given)


def test_a_pool_refuses_foreign_objects() -> None:
    layout = make_layout()
    for wrong in (None, [torch.zeros(4, 4)], "x"):
        with pytest.raises(TypeError, match=r"PagedLayout"):
            HostPool(wrong, 4)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"PagedLayout"):
            HostPool(layout, 4).view_for(wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^handle is a str; it must be the PoolHandle"):
        HostPool.attach(layout, "x")  # type: ignore[arg-type]


def test_a_layout_refuses_what_has_no_blocks() -> None:
    for tensors in (5, None, torch.zeros(4, 4)):
        with pytest.raises(TypeError, match=r"^tensors is .*; pass a list, "):
            PagedLayout(tensors)  # type: ignore[arg-type]
    for tensors in ([torch.zeros(4, 4), 1], (torch.zeros(4, 4), "x"), [torch.zeros(4, 4), None]):
        with pytest.raises(TypeError, match=r"^tensors\[1\] is .*; it must be a tensor"):
            PagedLayout(tensors)  # type: ignore[arg-type]
    for pair in (tuple, list):
        with pytest.raises(TypeError, match=r"tensor; pass the tensors of all layers in one list$"):
            PagedLayout([pair([torch.zeros(4, 4), torch.zeros(4, 4)])])  # type: ignore[list-item]
    with pytest.raises(ValueError, match=r"^tensors\[0\] .* has no dimension that counts blocks"):
        PagedLayout([torch.zeros(())])
    with pytest.raises(TypeError, match=r"^tensors\[1\] is torch\.sparse_coo"):
        PagedLayout([torch.zeros(4, 4), torch.zeros(4, 4).to_sparse()])


@pytest.mark.parametrize(
    ("op", "tensors", "others"),
    [
        (ops.swap_blocks, ["src", "dst", "block_mapping"], {"block_size_in_bytes": 8}),
        (ops.swap_kv_blocks, ["src_block_ids", "dst_block_ids"], {"src": [], "dst": []}),
        (ops.swap_blocks_batch, ["src_ptrs", "dst_ptrs", "sizes"], {}),
        (ops.expand_block_ids, ["block_ids"], {"block_size_factor": 2}),
    ],
)
def test_what_is_no_tensor_of_an_op_is_named(
    op: Callable[..., Any], tensors: list[str], others: dict[str, Any]
) -> None:
    """PyTorch would take None for an empty one, and prints the values of others."""
    given = dict.fromkeys(tensors, torch.zeros(0, dtype=torch.int64))
    for name in tensors:
        for value, kind in ((None, "None"), ([0], "a list")):
            with pytest.raises(TypeError, match=f"^{name} is {kind}; it must be a tensor$"):
                op(**{**given, **others, name: value})


def test_what_is_no_integer_of_an_op_is_named() -> None:
    """PyTorch would print all its schemas."""
    ids, block = torch.zeros(1, dtype=torch.int64), torch.zeros(1, 8, dtype=torch.uint8)
    mapping = torch.zeros(1, 2, dtype=torch.int64)
    for op, operands, names in (
        (ops.swap_blocks, (block, block.clone()), ["block_size_in_bytes"]),
        (ops.expand_block_ids, (ids,), ["block_size_factor", "skip_count", "count"]),
    ):
        given = {"block_mapping": mapping} if op is ops.swap_blocks else {}
        valid = dict.fromkeys(names, 8)
        for name in names:
            for value, kind in (("8", "a str"), (8.0, "a float")):
                with pytest.raises(TypeError, match=f"^{name} is {kind}; it must be an integer$"):
                    op(*operands, **{**given, **valid, name: value})
            op(*operands, **{**given, **valid, name: np.int64(8)})
    with pytest.raises(TypeError, match=r"^out is a list; it must be a tensor$"):
        ops.expand_block_ids(ids, 1, out=[0])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^is_src_access_order_any is 'yes'; it must be True or"):
        ops.swap_blocks_batch(ids, ids, ids, "yes")  # type: ignore[arg-type]


def test_a_list_has_a_tensor_for_each_layer() -> None:
    ids = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(TypeError, match=r"^dst is a Tensor; pass a list with a tensor for each"):
        ops.swap_kv_blocks([torch.zeros(4, 4)], torch.zeros(4, 4), ids, ids)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^dst\[1\] is None; it must be a tensor$"):
        ops.swap_kv_blocks([ids, ids], [ids, None], ids, ids)  # type: ignore[list-item]


def test_relays_are_a_list() -> None:
    for value, kind in ((1, "an int"), (None, "None"), ("1", "a str")):
        with pytest.raises(TypeError, match=f"^relays is {kind}; pass a list of GPU indices"):
            make_handler(relays=value)
