"""Where the driver registers no host memory, or the device has other addresses for it, pools of one
process are memory that the driver allocates.
"""

from __future__ import annotations

import gc

import pytest
import torch
from host_pools import round_trip
from logged import logged
from simulated_cache import needs_kernels
from simulated_driver import DEVICE, Driver, place, simulated

from torch_kvswap import HostPool, PagedLayout
from torch_kvswap.host_pool.memory import map_new
from torch_kvswap.ops import swap_blocks_batch

MACHINES = pytest.mark.parametrize("machine", ["refuses", "has other addresses"])
BLOCK = 4096


def cache_on(driver: Driver, machine: str) -> PagedLayout:
    if machine == "refuses":
        driver.refuse_registration()
    else:
        driver.set_attribute(91, 0)
    return place(driver, PagedLayout([torch.randint(256, (16, BLOCK), dtype=torch.uint8)]))


@MACHINES
@pytest.mark.parametrize(
    ("copy_method", "verify"),
    [
        *(("batch", "off"), ("strided", "off")),
        pytest.param("staged", "load", marks=needs_kernels),
        pytest.param("kernel", "load", marks=needs_kernels),
    ],
)
@simulated
def test_pages_are_pinned_without_registration(
    driver: Driver, machine: str, copy_method: str, verify: str
) -> None:
    layout = cache_on(driver, machine)
    pool = HostPool(layout, 8, verify=verify)
    assert (pool.is_pinned, pool.is_ready) == (True, True)
    assert not pool.pages.any()
    assert pool.pages.data_ptr() % 4096 == 0
    round_trip(layout, pool, copy_method=copy_method)
    assert "register " not in driver.log()
    pool.close()
    del pool
    gc.collect()
    assert driver.live("allocations") == 0


@MACHINES
@simulated
def test_shared_pages_are_pageable_with_one_warning(driver: Driver, machine: str) -> None:
    layout = cache_on(driver, machine)
    with logged() as messages, HostPool(layout, 8, shared=True) as pool:
        assert not pool.is_pinned
        round_trip(layout, pool)
    assert len(messages) == 1
    assert "leave shared=True out" in messages[0]
    assert ("as in confidential computing" in messages[0]) == (machine == "refuses")


@MACHINES
@simulated
def test_pages_are_pageable_without_memory_of_the_driver(driver: Driver, machine: str) -> None:
    layout = cache_on(driver, machine)
    driver.fail("cuMemHostAlloc", 1, 2)
    with logged() as messages, HostPool(layout, 8) as pool:
        assert not pool.is_pinned
        round_trip(layout, pool)
    assert len(messages) == 1
    assert "The pages are pageable now" in messages[0]


@simulated
def test_only_the_driver_copies_registered_memory_elsewhere(driver: Driver) -> None:
    driver.set_attribute(91, 0)
    host, device = map_new(4 * BLOCK, BLOCK, shared=False).tensor, driver.memory(4 * BLOCK, DEVICE)
    host.random_(256)
    for half in (0, 2 * BLOCK):
        driver.cuda.check("cuMemHostRegister", host.data_ptr() + half, 2 * BLOCK, 1)
    starts, sizes = BLOCK * torch.arange(4), torch.full((4,), BLOCK)
    driver.log()
    swap_blocks_batch(host.data_ptr() + starts, device.data_ptr() + starts, sizes)
    assert torch.equal(device, host)
    assert driver.log().count(f"copy {BLOCK} bytes") == 4
