"""A device without memory of its own is warned of."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from logged import logged
from simulated_driver import Driver, cache, simulated

from torch_kvswap import OffloadHandler
from torch_kvswap._native.log import warn_once
from torch_kvswap.devices.unified_memory import has_unified_memory, warn_of_unified_memory

TEXT = (
    "{} has no memory of its own: host pages take as much of the same memory as the blocks that they "
    "free; a larger cache does without copies (docs/devices.md)"
)


def set_properties(patch: pytest.MonkeyPatch, is_integrated: int) -> None:
    """What torch says of each GPU."""
    properties = SimpleNamespace(is_integrated=is_integrated)
    patch.setattr(torch.cuda, "is_available", lambda: True)
    patch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    patch.setattr(torch.cuda, "get_device_properties", lambda device: properties)


@pytest.mark.parametrize("is_integrated", [0, 1])
@simulated
def test_the_handlers_of_an_integrated_gpu_warn_once(driver: Driver, is_integrated: int) -> None:
    layout, pool = cache(driver)
    warn_once.cache_clear()
    with logged() as messages, pytest.MonkeyPatch.context() as patch:
        set_properties(patch, is_integrated)
        for _ in range(2):
            OffloadHandler(layout, pool).close()
    found = [message for message in messages if "memory of its own" in message]
    assert found == [TEXT.format("cuda:0")] * is_integrated


def test_other_devices_are_warned_of_by_their_type() -> None:
    warn_once.cache_clear()
    with logged() as messages:
        for name in ("cpu", "mps", "xpu", "mps"):
            warn_of_unified_memory(torch.device(name))
    assert messages == [TEXT.format("mps")]


@pytest.mark.gpu
def test_a_gpu_says_whether_it_has_memory_of_its_own() -> None:
    device = torch.device("cuda", 0)
    is_integrated = bool(torch.cuda.get_device_properties(device).is_integrated)
    assert has_unified_memory(device) == is_integrated
