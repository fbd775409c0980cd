"""The variables of the environment change how a handler copies, from one job to the next."""

from __future__ import annotations

import re

import pytest
import torch
from expecttest import assert_expected_inline
from stub import DEVICE, Driver, cache, pool, stubbed

from torch_kvswap.handler import OffloadHandler
from torch_kvswap.host_memory import HostPool
from torch_kvswap.layout import PagedLayout


def store_apart(driver: Driver, handler: OffloadHandler) -> str:
    """Stores three blocks that are no neighbours; returns what the driver copied."""
    driver.log()
    handler.wait(handler.store([1, 3, 5], [5, 1, 3]))
    for block, page in ((1, 5), (3, 1), (5, 3)):
        expected = torch.cat([tensor[block] for tensor in handler.layouts[0].tensors])
        assert torch.equal(handler.pools[0].pages[page, 0], expected)
    return "".join(re.findall(r"(?:copy|batch) .*\n", driver.log()))


@stubbed
def test_the_batch_call_is_left_out_or_made_smaller_when_asked(driver: Driver) -> None:
    with OffloadHandler(*cache(driver)) as handler, pytest.MonkeyPatch.context() as patch:
        assert_expected_inline(
            store_apart(driver, handler),
            """\
batch of 6 on stream 101, source order 1 from 0
""",
        )
        patch.setenv("KVSWAP_BATCH_LIMIT", "4")
        assert_expected_inline(
            store_apart(driver, handler),
            """\
batch of 4 on stream 101, source order 1 from 0
batch of 2 on stream 101, source order 1 from 0
""",
        )
        patch.setenv("KVSWAP_BATCH", "0")
        assert_expected_inline(
            store_apart(driver, handler),
            """\
copy 64 bytes on stream 101
copy 64 bytes on stream 101
copy 64 bytes on stream 101
copy 64 bytes on stream 101
copy 64 bytes on stream 101
copy 64 bytes on stream 101
""",
        )


@pytest.mark.parametrize(
    "variable", ["KVSWAP_BATCH", "KVSWAP_BATCH_LIMIT", "KVSWAP_CHECK_ADDRESSES"]
)
@stubbed
def test_a_variable_that_says_nothing_known_fails_the_job_and_is_named(
    driver: Driver, variable: str
) -> None:
    with OffloadHandler(*cache(driver)) as handler:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(variable, "off")
            job = handler.store([0, 2], [0, 2])
            assert job.result is not None
            assert str(job.result.error).startswith(f"{variable} is 'off'; expected ")
        assert not handler.pools[0].pages.any()
        store_apart(driver, handler)


def half_a_cache(driver: Driver) -> tuple[PagedLayout, HostPool]:
    """Whose third block leaves the device's memory in its middle."""
    layout = PagedLayout([torch.ones(4, 64, dtype=torch.uint8)])
    driver.adopt(layout.tensors[0].view(-1)[: 2 * 64 + 32], DEVICE)
    layout.device = torch.device("cuda", 0)
    return layout, pool(driver, layout, num_pages=4)


@stubbed
def test_addresses_are_checked_against_their_allocations_when_asked(driver: Driver) -> None:
    with OffloadHandler(*half_a_cache(driver)) as handler:
        handler.wait(handler.store([2], [0]))  # the control: nobody looks
        handler.pools[0].pages.zero_()
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("KVSWAP_CHECK_ADDRESSES", "1")
            handler.wait(handler.store([0], [1]))
            job = handler.store([2], [2])
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
        result = handler.store([0], [0]).result
        assert result is not None
        assert re.match(r"src_ptrs\[0\] is 0x40 .* only the first 0 lie", str(result.error))
