"""Environment variables that a handler reads when it is created."""

from __future__ import annotations

import re

import pytest
import torch
from expecttest import assert_expected_inline
from simulated_driver import DEVICE, Driver, cache, pool, simulated

from torch_kvswap.host_pool.pool import HostPool
from torch_kvswap.layout import PagedLayout
from torch_kvswap.offload.handler import OffloadHandler


def store_apart(driver: Driver, handler: OffloadHandler) -> list[str]:
    """Stores three blocks that are no neighbours; returns how the driver copied them."""
    driver.log()
    handler.synchronize(handler.store(gpu_block_ids=[1, 3, 5], page_ids=[5, 1, 3]))
    for block, page in ((1, 5), (3, 1), (5, 3)):
        expected = torch.cat([tensor[block] for tensor in handler.layouts[0].tensors])
        assert torch.equal(handler.pools[0].pages[page, 0], expected)
    return re.findall(r"^(?:copy|batch) .*", driver.log(), re.MULTILINE)


@pytest.mark.parametrize(
    ("variables", "copies"),
    [
        ({}, ["batch of 6"]),
        ({"KVSWAP_BATCH_LIMIT": "4"}, ["batch of 4", "batch of 2"]),
        ({"KVSWAP_BATCH": "0"}, ["copy 64 bytes"] * 6),
    ],
    ids=["as it is", "smaller", "left out"],
)
@simulated
def test_the_batch_call_is_made_smaller_or_left_out_when_asked(
    driver: Driver, variables: dict[str, str], copies: list[str]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        handler = OffloadHandler(*cache(driver))
    # Changed later, they change nothing for this handler.
    assert [line.partition(" on ")[0] for line in store_apart(driver, handler)] == copies
    handler.close()


@pytest.mark.parametrize(
    "variable", ["KVSWAP_BATCH", "KVSWAP_BATCH_LIMIT", "KVSWAP_CHECK_ADDRESSES"]
)
@simulated
def test_a_variable_that_says_nothing_known_is_named_and_there_is_no_handler(
    driver: Driver, variable: str
) -> None:
    gpu, host = cache(driver)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(variable, "off")
        with pytest.raises(ValueError, match=f"{variable} is 'off'; expected "):
            OffloadHandler(gpu, host)
    assert driver.live("streams") == 0
    with OffloadHandler(gpu, host) as handler:
        assert store_apart(driver, handler)


def half_a_cache(driver: Driver) -> tuple[PagedLayout, HostPool]:
    """Whose third block leaves the device's memory in its middle."""
    layout = PagedLayout([torch.ones(4, 64, dtype=torch.uint8)])
    driver.adopt(layout.tensors[0].view(-1)[: 2 * 64 + 32], DEVICE)
    layout.device = torch.device("cuda", 0)
    return layout, pool(driver, layout, num_pages=4)


@simulated
def test_addresses_are_checked_against_their_allocations_when_asked(driver: Driver) -> None:
    gpu, host = half_a_cache(driver)
    with OffloadHandler(gpu, host) as handler:
        handler.synchronize(
            handler.store(gpu_block_ids=[2], page_ids=[0])
        )  # the control: nobody looks
        handler.pools[0].pages.zero_()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVSWAP_CHECK_ADDRESSES", "1")
        handler = OffloadHandler(gpu, host)
    with handler:
        handler.synchronize(handler.store(gpu_block_ids=[0], page_ids=[1]))
        job = handler.store(gpu_block_ids=[2], page_ids=[2])
        assert job.result is not None
        assert_expected_inline(
            re.sub("0x[0-9a-f]+", "0x~", str(job.result.error)),
            """src_ptrs[0] is 0x~ (device 0, allocation 0x~ + 160 bytes), and of its 64 bytes only the first 32 lie in memory that can be read""",
        )
        assert handler.pools[0].pages.sum(dim=(1, 2)).tolist() == [0, 64, 0, 0]


def test_addresses_of_a_cache_on_the_cpu_are_checked_too(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = PagedLayout([torch.ones(4, 64, dtype=torch.uint8)])
    host = HostPool(layout, num_pages=4)
    layout.bases -= layout.bases - 64  # where nobody has memory
    monkeypatch.setenv("KVSWAP_CHECK_ADDRESSES", "1")
    with OffloadHandler(layout, host) as handler:
        result = handler.store(gpu_block_ids=[0], page_ids=[0]).result
        assert result is not None
        assert re.match(r"src_ptrs\[0\] is 0x40 .* only the first 0 lie", str(result.error))
