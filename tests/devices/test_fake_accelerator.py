"""The fake accelerator tells of a host that touches its memory, and of memory that is freed too early."""

import ctypes
import signal

import pytest
import torch
from fake_accelerator import DEVICE_TYPE, on_fake_accelerator
from processes import in_child


@on_fake_accelerator
def test_the_host_dies_if_it_touches_device_memory(accelerator):
    cache, page = torch.ones(64, device=DEVICE_TYPE), torch.zeros(64).pin_memory()

    def read(tensor: torch.Tensor) -> bytes:
        return ctypes.string_at(tensor.data_ptr(), 8)

    assert in_child(lambda: read(page) == bytes(8)) == 1
    assert in_child(lambda: read(cache)) == -signal.SIGSEGV
    assert in_child(lambda: ctypes.memset(cache.data_ptr(), 7, 8)) == -signal.SIGSEGV


@on_fake_accelerator
def test_memory_that_another_stream_uses_after_it_was_freed_is_told(accelerator):
    cache, page = torch.ones(64, device=DEVICE_TYPE), torch.zeros(64).pin_memory()
    with torch.Stream(DEVICE_TYPE) as stream, accelerator.hold(stream):
        page.copy_(cache, non_blocking=True)
        del cache  # its own stream frees it before the copy runs
        torch.Stream(DEVICE_TYPE).synchronize()
    stream.synchronize()
    assert "copy: it uses 256 bytes of the device that were freed" in accelerator.take_error()
    assert not page.any()


@on_fake_accelerator
def test_a_host_that_waits_for_a_held_stream_is_told(accelerator):
    stream = torch.Stream(DEVICE_TYPE)
    with accelerator.hold(stream), pytest.raises(RuntimeError, match="that the test holds"):
        stream.synchronize()
