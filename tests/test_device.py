"""Streams and events of a device, and which of the caller's a transfer may wait for."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from refusal import refusal

from torch_kvswap.cpu_device import CpuDevice
from torch_kvswap.cuda_device import CudaDevice
from torch_kvswap.device import open_device

CUDA = torch.device("cuda:0")


def test_a_device_that_cannot_be_copied_from_is_refused() -> None:
    assert_expected_inline(
        refusal(open_device, torch.device("meta")),
        """ValueError: a cache on meta cannot be moved; its tensors must be on cuda or cpu""",
    )


def test_on_the_cpu_an_event_has_happened_when_it_is_recorded() -> None:
    device = open_device(torch.device("cpu"))
    stream, start, end = device.new_stream(), device.new_event(), device.new_event()
    start.record(stream)
    end.record(stream)
    assert end.query()
    assert 0 <= start.elapsed_time(end) < 1000


def test_on_the_cpu_there_is_nothing_to_wait_for() -> None:
    assert CpuDevice().resolve_after(None) == (None, None)
    assert CpuDevice().resolve_after(()) == (None, None)


def test_on_the_cpu_a_stream_to_wait_for_is_refused() -> None:
    assert_expected_inline(
        refusal(CpuDevice().resolve_after, object()),
        """\
TypeError: after= must be None or () for a cache on the CPU, whose transfers run inside
the call and can wait for no stream; it is object: wait for it first""",
    )


def test_on_the_cpu_no_error_means_that_the_device_is_lost() -> None:
    assert not CpuDevice().is_lost_by(MemoryError())


def test_an_error_of_cuda_loses_the_device_unless_it_is_about_capture() -> None:
    device = CudaDevice(CUDA)
    assert not device.is_lost_by(TimeoutError("a signal handler's, during a wait"))
    error = RuntimeError("CUDA error")
    for code, lost in [(700, True), (710, True), (900, False), (906, False)]:
        error.error_code = code  # type: ignore[attr-defined]
        assert device.is_lost_by(error) is lost


@pytest.mark.gpu
def test_none_is_the_current_stream_of_the_device_and_the_empty_tuple_nothing() -> None:
    device = CudaDevice(CUDA)
    side = torch.cuda.Stream(CUDA)
    with torch.cuda.stream(side):
        assert device.resolve_after(None) == (side, None)
        assert device.resolve_stream(None) == side
    assert device.resolve_after(side) == (side, None)
    assert device.resolve_after(()) == (None, None)


@pytest.mark.gpu
def test_an_event_is_waited_for_only_once_it_is_recorded() -> None:
    device = CudaDevice(CUDA)
    event = torch.cuda.Event()
    with pytest.raises(ValueError, match="never recorded"):
        device.resolve_after(event)
    event.record()
    assert device.resolve_after(event) == (None, event)


@pytest.mark.gpu
@pytest.mark.parametrize("after", ["stream", 0, [], (1,), torch.Stream])
def test_what_is_no_stream_and_no_event_is_refused(after: object) -> None:
    with pytest.raises(TypeError, match="after= must be None"):
        CudaDevice(CUDA).resolve_after(after)
    with pytest.raises(TypeError, match="can wait"):
        CudaDevice(CUDA).resolve_stream(after)


@pytest.mark.gpu
def test_a_stream_of_another_device_is_refused_but_may_wait() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    other = torch.cuda.Stream("cuda:1")
    with pytest.raises(ValueError, match="record an event on that stream"):
        CudaDevice(CUDA).resolve_after(other)
    assert CudaDevice(CUDA).resolve_stream(other) == other


@pytest.mark.gpu
def test_a_captured_stream_is_refused_and_the_capture_goes_on() -> None:
    device = CudaDevice(CUDA)
    numbers = torch.zeros(4, device=CUDA)
    side = torch.cuda.Stream(CUDA)
    graph = torch.cuda.CUDAGraph()
    numbers.add_(0)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        captured = torch.cuda.current_stream()
        with pytest.raises(RuntimeError, match="is capturing a CUDA graph"):
            device.check_not_capturing()
        with pytest.raises(RuntimeError, match="is capturing a CUDA graph"):
            device.resolve_stream(None)
        with torch.cuda.stream(side):
            device.check_not_capturing()
            with pytest.raises(RuntimeError, match="is capturing a CUDA graph"):
                device.resolve_after(captured)
        numbers.add_(1)
    graph.replay()
    torch.cuda.synchronize()
    assert numbers.tolist() == [1, 1, 1, 1]


@pytest.mark.gpu
def test_a_stream_made_current_leaves_the_callers_as_it_was() -> None:
    device = CudaDevice(CUDA)
    stream = device.new_stream()
    side = torch.cuda.Stream(CUDA)
    with torch.cuda.stream(side):
        with device.current(stream):
            assert torch.cuda.current_stream() == stream
        assert torch.cuda.current_stream() == side
        with pytest.raises(KeyError), device.current(stream):
            raise KeyError
        assert torch.cuda.current_stream() == side
