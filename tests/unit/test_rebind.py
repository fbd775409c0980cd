"""After rebind() jobs copy from the cache's new memory, and never from the old."""

from __future__ import annotations

import itertools

import pytest
import torch
from error_text import error_text
from expecttest import assert_expected_inline
from simulated_cache import CURRENT, needs_kernels
from simulated_driver import Driver, on_device, simulated
from torch import Tensor

from torch_kvswap import HostPool, OffloadHandler, PagedLayout

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def make_cache(device: str, value: int, num_blocks: int = 6) -> Tensor:
    return torch.full((num_blocks, 40), value, dtype=torch.uint8, device=device)


def test_a_moved_tensor_is_refused_until_rebound() -> None:
    cache = make_cache("cpu", 1)
    layout = PagedLayout([cache])
    with OffloadHandler(layout, HostPool(layout, 4)) as handler:
        cache.set_(make_cache("cpu", 7))
        with pytest.raises(RuntimeError, match=r"tensors\[0\] has moved .* pass it to rebind"):
            handler.store(gpu_block_ids=[0], page_ids=[0])
        assert handler.poll() == []
        handler.rebind(PagedLayout([cache]))
        handler.synchronize(handler.store(gpu_block_ids=[0], page_ids=[0]))
        assert handler.pools[0].pages[0].unique().tolist() == [7]


def test_another_kind_of_cache_is_refused() -> None:
    cache = make_cache("cpu", 1)
    layout = PagedLayout([cache])
    with OffloadHandler(layout, HostPool(layout, 4)) as handler:
        wider = PagedLayout([torch.zeros(6, 41, dtype=torch.uint8)])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(handler._native, "synchronize", lambda *_: pytest.fail("it waits"))
            errors = [error_text(handler.rebind, moved) for moved in (wider, [layout, layout])]
        handler.store(gpu_block_ids=[0], page_ids=[0]).synchronize()
    with OffloadHandler([layout] * 2, [HostPool(layout, 4) for _ in range(2)]) as handler:
        errors += [error_text(handler.rebind, moved) for moved in (layout, [layout, 5], [layout])]
        handler.rebind([layout] * 2)
    assert_expected_inline(
        "\n".join(errors),
        """\
ValueError: the cache does not fit the host pool: tensors[0]: uint8 [blocks, 41] in the
cache, uint8 [blocks, 40] in the host pool; make the pool from this layout
TypeError: gpu is a list of 2 PagedLayouts; pass a PagedLayout, as before
TypeError: gpu is a PagedLayout; pass a list of 2 PagedLayouts, as before
TypeError: gpu is a list of 2 items; pass a list of 2 PagedLayouts, as before
ValueError: 1 layout and 2 host pools: each layout needs one pool""",
    )


@simulated
def test_a_job_after_the_wait_keeps_it(driver: Driver) -> None:
    driver.set_mode("manual")
    driver.set_stream(0, CURRENT)
    old, new = torch.full((6, 40), 1, dtype=torch.uint8), torch.full((6, 40), 2, dtype=torch.uint8)
    layout = on_device(driver, old.view(1, 6, 40))
    with OffloadHandler(layout, HostPool(layout, num_pages=4)) as handler:
        moved = handler._native.groups.moved_to(on_device(driver, new.view(1, 6, 40)))
        hold = driver.hold(CURRENT)
        handler.store(gpu_block_ids=[0], page_ids=[0])  # after rebind() has waited
        with pytest.raises(RuntimeError, match="another thread has submitted a job"):
            handler._native.move_to(moved)
        driver.release(hold)
        driver.set_mode("immediate")
        handler.synchronize()
        assert handler.pools[0].pages[0].unique().tolist() == [1]
        handler._native.move_to(moved)


FALLIBLE = ("cuPointerGetAttributes", "cuMemAlloc", "cuMemcpyAsync", "cuStreamSynchronize")


@pytest.mark.parametrize("call", FALLIBLE)
@needs_kernels
@simulated
def test_a_failed_rebind_changes_nothing(driver: Driver, call: str) -> None:
    old = torch.randint(256, (2, 16, 4096), dtype=torch.uint8)
    new = torch.randint(256, (2, 2048, 4096), dtype=torch.uint8)
    before, layout, moved = old.clone(), on_device(driver, old), on_device(driver, new)
    with OffloadHandler(layout, HostPool(layout, 4), copy_method="kernel") as handler:
        allocations = driver.live("allocations")
        refused = 0
        for nth in itertools.count(1):
            calls = driver.calls(call)
            driver.fail(call, nth, code=2)
            try:
                handler.rebind(moved)
            except RuntimeError as error:
                if "CUDA_ERROR_SIMULATED (2)" not in str(error):
                    raise
                refused += 1
            else:
                if driver.calls(call) - calls < nth:
                    break  # the fault is still to come
                handler.rebind(layout)  # that call only asked whether CUDA is in use
            assert handler.layouts == (layout,)
            assert driver.live("allocations") == allocations
            with pytest.raises(IndexError, match=r"gpu_block_ids\[0\] is 2000; there are 16"):
                handler.load(page_ids=[0], gpu_block_ids=[2000])
            handler.synchronize(handler.store(gpu_block_ids=[15], page_ids=[3]))
            assert torch.equal(handler.pools[0].pages[3, 0], before[:, 15].flatten())
            handler.synchronize(handler.load(page_ids=[3], gpu_block_ids=[0]))
            assert torch.equal(old[:, 0], before[:, 15])
        assert refused > 0
        assert handler.layouts == (moved,)
        assert driver.live("allocations") == allocations
