"""The fake accelerator behaves like an accelerator of PyTorch, and what it is told to do wrong, it does."""

import ctypes
import re
import signal
from pathlib import Path

import pytest
import torch
from fake_accelerator import (
    DEVICE_TYPE,
    Accelerator,
    needs_compiler,
    on_fake_accelerator,
)
from fake_accelerator.tests import workers
from patience import in_time
from processes import in_child, run_script

NUM_VALUES = 64


def device_and_page(value: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """A tensor of a value on the device, where nothing is pending, and pinned memory of zeros."""
    on_device = torch.full((NUM_VALUES,), value, dtype=torch.int64, device=DEVICE_TYPE)
    torch.accelerator.synchronize()
    return on_device, torch.zeros(NUM_VALUES, dtype=torch.int64).pin_memory()


def current() -> torch.Stream:
    return torch.accelerator.current_stream()


def values(tensor: torch.Tensor) -> set[int]:
    return {int(value) for value in tensor.tolist()}


@on_fake_accelerator
def test_the_host_dies_if_it_touches_device_memory(accelerator):
    cache, page = device_and_page()

    def read(tensor: torch.Tensor) -> bytes:
        return ctypes.string_at(tensor.data_ptr(), 8)

    def write(tensor: torch.Tensor) -> object:
        return ctypes.memset(tensor.data_ptr(), 7, 8)

    assert in_child(lambda: read(page) == bytes(8)) == 1
    assert in_child(lambda: read(cache)) == -signal.SIGSEGV
    assert in_child(lambda: write(cache)) == -signal.SIGSEGV


@on_fake_accelerator
def test_memory_that_another_stream_uses_without_being_recorded_is_told(accelerator):
    cache, page = device_and_page()
    stream = torch.Stream(DEVICE_TYPE)
    with accelerator.hold(stream):
        with stream:
            page.copy_(cache, non_blocking=True)
        del cache  # before the copy runs
    with pytest.raises(RuntimeError, match=r"uses 512 bytes at 0x.*, which were freed"):
        torch.accelerator.synchronize()
    assert not page.any()
    assert ", copy 512 bytes to the host: it uses 512 bytes" in accelerator.take_error()


@on_fake_accelerator
def lose_the_device(accelerator: Accelerator) -> None:
    cache, _ = device_and_page()
    cache.index_select(0, torch.tensor([NUM_VALUES]).to(DEVICE_TYPE))
    assert in_time(lambda: accelerator.pending() == "")


worker = workers.fixture()


@pytest.mark.slow
@needs_compiler
def test_a_test_fails_if_it_lost_the_device_and_did_not_look(worker):
    failure = worker.call(__name__, "lose_the_device", {})
    assert failure is not None
    assert "used wrongly:\nfakeaccel:0 stream 0, aten::index_select" in failure


@needs_compiler
def test_the_program_of_the_documentation_runs():
    page = Path(__file__).parents[2] / "docs" / "fake_accelerator.md"
    (program,) = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    assert run_script(program).splitlines() == [
        "False []",
        "store done None",
        "load failed fakeaccel:0: copy call 4 fails, as the test wants",
    ]
