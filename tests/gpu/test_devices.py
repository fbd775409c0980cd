"""On several GPUs: streams and current devices other than the handler's, and a process for each
GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from drained import drain
from gpu_cache import NEW, OLD, ROW, GpuCache, only

pytestmark = pytest.mark.gpu


@pytest.fixture
def two_gpus() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs two GPUs, here are {torch.cuda.device_count()}")


@pytest.fixture
def gpu(two_gpus: None) -> Iterator[GpuCache]:
    """On cuda:1, while cuda:0 is current."""
    torch.cuda.set_device(0)
    with GpuCache(device="cuda:1") as gpu:
        yield gpu
    assert torch.cuda.current_device() == 0


@pytest.mark.parametrize("current", [0, 1])
def test_the_current_device_stays_so_after_every_call(gpu: GpuCache, current: int) -> None:
    with torch.cuda.device(current):
        streams = [torch.cuda.current_stream(device) for device in (0, 1)]
        busy = gpu.slow_on(gpu.side, ms=20)
        assert torch.cuda.current_device() == current
        for call in (
            lambda: gpu.handler.store(gpu_block_ids=[1], page_ids=[0], after=busy),
            lambda: gpu.handler.load(page_ids=[0], gpu_block_ids=[1], expedited=True).wait(),
            lambda: gpu.handler.load(page_ids=[0], gpu_block_ids=[2], layer_groups=1).wait(
                layer_group=0
            ),
            lambda: gpu.handler.cancel(gpu.handler.store(gpu_block_ids=[1], page_ids=[0])),
            gpu.handler.poll,
            gpu.handler.metrics,
            lambda: drain(gpu.handler),
            lambda: gpu.handler.rebind(gpu.layout),
            gpu.another_handler().close,
            gpu.handler.close,
            gpu.host.close,
        ):
            call()
            assert torch.cuda.current_device() == current
            assert [torch.cuda.current_stream(device) for device in (0, 1)] == streams


STREAMS: dict[str, Callable[[int], torch.cuda.Stream]] = {  # torch 2.11 takes no handle 1
    "default": torch.cuda.default_stream,
    "per-thread": lambda gpu: torch.cuda.ExternalStream(2, torch.device("cuda", gpu)),
    "side": torch.cuda.Stream,
}


@pytest.mark.parametrize("name", STREAMS)
@pytest.mark.parametrize("wait", ["job", "layer group", "control"])
def test_any_stream_of_another_gpu_can_wait(gpu: GpuCache, name: str, wait: str) -> None:
    other = STREAMS[name](0)
    seen = torch.zeros(ROW, dtype=torch.uint8, device="cuda:0")
    torch.cuda.synchronize(0)

    def look() -> torch.cuda.Event:
        # PyTorch orders a copy between GPUs behind the current streams of both: consumer is idle.
        with torch.cuda.stream(gpu.consumer), torch.cuda.stream(other):
            seen.copy_(gpu.cache[1])
            return other.record_event()

    look().synchronize()  # the first copy between two GPUs makes ready what it needs
    assert only(seen) == OLD
    busy = gpu.hold_on(gpu.side)
    job = gpu.handler.load(page_ids=[0], gpu_block_ids=[1], after=busy)
    if wait == "job":
        job.wait(other)
    elif wait == "layer group":
        job.wait(other, layer_group=job.layer_group_of(0))
    event = look()
    assert not busy.query()
    if wait != "control":
        gpu.release()
    event.synchronize()
    gpu.release()
    assert only(seen) == (OLD if wait == "control" else NEW)
    gpu.handler.synchronize(job)
