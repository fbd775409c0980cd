"""The fake accelerator behaves like an accelerator of PyTorch, and what it is told to do wrong, it does."""

import ctypes
import re
import signal
import sys
from pathlib import Path

import pytest
import torch
from fake_accelerator import (
    DEVICE_TYPE,
    Accelerator,
    load,
    needs_compiler,
    on_fake_accelerator,
)
from fake_accelerator.tests import environment, workers
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


def event(stream: torch.Stream | None = None, **options: bool) -> torch.Event:
    """An event that was recorded on the stream."""
    made = torch.Event(DEVICE_TYPE, **options)
    made.record(stream or current())
    return made


def values(tensor: torch.Tensor) -> set[int]:
    return {int(value) for value in tensor.tolist()}


# Order.


def load_after_compute(accelerator: Accelerator, wait: bool) -> set[int]:
    """What a stream reads of a tensor that another one writes, if it waits for that or does not."""
    cache, page = device_and_page(0)
    compute, copies = torch.Stream(DEVICE_TYPE), torch.Stream(DEVICE_TYPE)
    with accelerator.hold(compute):
        with compute:
            cache.fill_(1)
            written = event()
        with copies:
            if wait:
                copies.wait_event(written)
            page.copy_(cache, non_blocking=True)
        if not wait:
            copies.synchronize()
        assert copies.query() == (not wait)
    copies.synchronize()
    compute.synchronize()
    return values(page)


@on_fake_accelerator
def test_a_stream_that_waits_for_an_event_sees_the_bytes_before_it(accelerator):
    assert load_after_compute(accelerator, wait=True) == {1}


@on_fake_accelerator
def test_a_stream_that_does_not_wait_sees_old_bytes(accelerator):
    assert load_after_compute(accelerator, wait=False) == {0}


# Memory.


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
def test_memory_is_freed_after_what_its_stream_has_to_do(accelerator):
    cache, page = device_and_page()
    before = accelerator.counters()
    with accelerator.hold(current()):
        page.copy_(cache, non_blocking=True)
        del cache
        assert accelerator.counters().live_blocks == before.live_blocks
    current().synchronize()
    assert accelerator.counters().live_blocks == before.live_blocks - 1
    assert accelerator.counters().live_bytes == before.live_bytes - 8 * NUM_VALUES
    assert values(page) == {1}


def free_under_a_copy(accelerator: Accelerator, record: bool) -> torch.Tensor:
    """Copies on a stream that is held, and frees the device memory before the copy runs."""
    cache, page = device_and_page()
    stream = torch.Stream(DEVICE_TYPE)
    with accelerator.hold(stream):
        with stream:
            page.copy_(cache, non_blocking=True)
        if record:
            cache.record_stream(stream)
        del cache
    return page


@on_fake_accelerator
def test_memory_that_another_stream_uses_is_kept_if_it_was_recorded(accelerator):
    page = free_under_a_copy(accelerator, record=True)
    torch.accelerator.synchronize()
    assert values(page) == {1}


@on_fake_accelerator
def test_memory_that_another_stream_uses_without_being_recorded_is_told(accelerator):
    page = free_under_a_copy(accelerator, record=False)
    with pytest.raises(RuntimeError, match=r"uses 512 bytes at 0x.*, which were freed"):
        torch.accelerator.synchronize()
    assert values(page) == {0}
    assert ", copy 512 bytes to the host: it uses 512 bytes" in accelerator.take_error()


# Failures.


@on_fake_accelerator
def test_a_copy_that_fails_when_it_runs_loses_the_device(accelerator):
    cache, page = device_and_page()
    accelerator.fail("copy", when_it_runs=True)
    page.copy_(cache, non_blocking=True)
    with pytest.raises(RuntimeError, match=r"fakeaccel:0 is lost: .*to the host: it fails"):
        torch.accelerator.synchronize()
    assert values(page) == {0}


# Processes.


@on_fake_accelerator
def use_a_stream_of_before(accelerator: Accelerator) -> None:
    sys.modules[__name__].kept.query()


@on_fake_accelerator
def keep_a_stream(accelerator: Accelerator) -> None:
    sys.modules[__name__].kept = torch.Stream(DEVICE_TYPE)
    accelerator.hold(sys.modules[__name__].kept)
    accelerator.hold_copies()
    accelerator.fail("copy")
    accelerator.lose(1)


@on_fake_accelerator
def use_both_devices(accelerator: Accelerator) -> None:
    for index in range(2):
        assert torch.ones(2, device=f"{DEVICE_TYPE}:{index}").tolist() == [1, 1]
    assert accelerator.counters().live_streams == 0


@on_fake_accelerator
def lose_the_device(accelerator: Accelerator) -> None:
    cache, _ = device_and_page()
    cache.index_select(0, torch.tensor([NUM_VALUES]).to(DEVICE_TYPE))
    assert in_time(lambda: accelerator.pending() == "")


worker = workers.fixture()


@pytest.mark.slow
@needs_compiler
def test_a_test_leaves_nothing_to_the_next_but_streams_that_have_ended(worker):
    assert worker.call(__name__, "keep_a_stream", {}) is None
    assert worker.call(__name__, "use_both_devices", {}) is None
    failure = worker.call(__name__, "use_a_stream_of_before", {})
    assert failure is not None
    assert "stream 1 of fakeaccel:0 does not exist" in failure


@pytest.mark.slow
@needs_compiler
def test_a_test_fails_if_it_lost_the_device_and_did_not_look(worker):
    failure = worker.call(__name__, "lose_the_device", {})
    assert failure is not None
    assert "used wrongly:\nfakeaccel:0 stream 0, aten::index_select" in failure


def test_the_process_of_other_tests_has_no_fake_accelerator():
    assert torch.accelerator.current_accelerator() != torch.device("privateuseone")
    assert "fake" not in torch._C._get_privateuse1_backend_name()
    assert load.cache_info().currsize == 0
    assert "OMP_NUM_THREADS" in environment()


@needs_compiler
def test_the_program_of_the_documentation_runs():
    page = Path(__file__).parents[2] / "docs" / "fake_accelerator.md"
    (program,) = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    assert run_script(program).splitlines() == [
        "False []",
        "store done None",
        "load failed fakeaccel:0: copy call 4 fails, as the test wants",
    ]
