"""Environment variables that a handler reads when it is created."""

from __future__ import annotations

import re

import pytest
import torch
from simulated_driver import Driver, cache, simulated

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
        ({"KVSWAP_BATCH": "0"}, ["copy 64 bytes"] * 6),
    ],
    ids=["as it is", "left out"],
)
@simulated
def test_the_batch_call_is_left_out_when_asked(
    driver: Driver, variables: dict[str, str], copies: list[str]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        handler = OffloadHandler(*cache(driver))
    # Changed later, they change nothing for this handler.
    assert [line.partition(" on ")[0] for line in store_apart(driver, handler)] == copies
    handler.close()
