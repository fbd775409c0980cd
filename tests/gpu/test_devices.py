"""On several GPUs: streams and current devices other than the handler's, and a process for each
GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from device_pairs import place
from drained import drain
from gpu_cache import NEW, OLD, ROW, GpuCache, Hold, keep_busy, only

from torch_kvswap import ops

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


def hold_and_fill(gpu: GpuCache, value: int) -> Hold:
    with torch.cuda.device(1):
        busy = gpu.hold()
        gpu.cache.fill_(value)
    return busy


@pytest.mark.parametrize("current", [0, 1])
@pytest.mark.parametrize("after", ["waits", "control"])
def test_jobs_wait_for_their_own_devices_stream(gpu: GpuCache, current: int, after: str) -> None:
    nothing = None if after == "waits" else ()
    with torch.cuda.device(current):
        busy = hold_and_fill(gpu, OLD + 1)
        store = gpu.handler.store(gpu_block_ids=[1], page_ids=[0], after=nothing)
        assert not busy.query()
        if after == "waits":
            gpu.release()
        gpu.handler.synchronize(store)
        gpu.release()
        assert gpu.page() == (OLD + 1 if after == "waits" else OLD)
        torch.cuda.synchronize(1)
        with torch.cuda.device(1):
            gpu.hold()
            gpu.look()
        load = gpu.handler.load(page_ids=[2], gpu_block_ids=[1], after=nothing)
        if after == "waits":
            gpu.release()
        else:
            gpu.handler.synchronize(load)
            gpu.release()
        load.wait()  # the current stream of cuda:1
        other = torch.cuda.Stream("cuda:0")
        load.wait(other)
        other.synchronize()
        assert load.query()
        torch.cuda.synchronize(1)
        assert only(gpu.seen[1]) == (OLD + 1 if after == "waits" else NEW)
        assert only(gpu.cache[1]) == NEW


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


@pytest.mark.parametrize("where", ["cpu", "pinned"])
def test_swaps_to_the_host_are_ordered_on_streams(two_gpus: None, where: str) -> None:
    side = torch.cuda.Stream(1)
    src = torch.zeros(4, ROW, dtype=torch.uint8, device="cuda:1")
    dst = place(torch.zeros(4, ROW, dtype=torch.uint8), where)
    mapping = torch.arange(4)[:, None].expand(4, 2)
    ops.swap_blocks(src, dst, ROW, mapping)  # makes ready what the next one needs
    torch.cuda.synchronize(1)
    with torch.cuda.stream(side):
        keep_busy(100)
        src.fill_(NEW)
        with torch.cuda.device(0):
            ops.swap_blocks(src, dst, ROW, mapping)
    assert only(dst) == NEW


@pytest.mark.parametrize("streams", ["default, side", "side, default", "default, default"])
@pytest.mark.parametrize("late", ["source", "destination"])
@pytest.mark.parametrize("ordered", [True, False], ids=["ordered", "control"])
def test_swaps_between_gpus_are_ordered_on_streams(
    two_gpus: None, streams: str, late: str, ordered: bool
) -> None:
    of = [STREAMS[name](gpu) for gpu, name in enumerate(streams.split(", "))]
    others = [torch.cuda.Stream(gpu) for gpu in (0, 1)]
    src = torch.zeros(4, ROW, dtype=torch.uint8, device="cuda:0")
    dst = torch.zeros(4, ROW, dtype=torch.uint8, device="cuda:1")

    def swap(source: torch.cuda.Stream, destination: torch.cuda.Stream) -> None:
        with torch.cuda.stream(source), torch.cuda.stream(destination):
            ops.swap_blocks(src, dst, ROW, torch.arange(4)[:, None].expand(4, 2))

    def fill(stream: torch.cuda.Stream, value: int) -> None:
        with torch.cuda.stream(stream):
            src.fill_(value)

    fill(of[0], 0)
    swap(*others)  # makes ready what the first ones need
    for gpu in (0, 1):
        torch.cuda.synchronize(gpu)
    with torch.cuda.stream(of[("source", "destination").index(late)]):
        hold = Hold()
    # In order: the source is written, copied, and written again.
    fill(of[0], 1)
    if not ordered and late == "destination":
        others[0].wait_stream(of[0])  # writes again behind the first write, but not behind the copy
    swap(*(of if ordered or late == "destination" else others))
    fill(of[0] if ordered or late == "source" else others[0], 2)
    if not ordered:
        others[0].synchronize()  # what is not ordered behind the hold runs now
        if late == "source":
            others[1].synchronize()
    hold.release()
    for gpu in (0, 1):
        torch.cuda.synchronize(gpu)
    assert only(src) == 2
    assert only(dst) == (1 if ordered else {"source": 0, "destination": 2}[late])
