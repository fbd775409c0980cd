"""On a GPU: calls of a handler leave a CUDA graph valid that another thread is capturing."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from gpu_cache import NEW, OLD, GpuCache, only
from patience import PATIENCE

from torch_kvswap.host_pool.pool import HostPool

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("no_hang")]


def captured(gpu: GpuCache, meanwhile: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """A graph that adds 2 to the first block, in the default mode, "global"."""
    gpu.cache[0].add_(1)  # loads the kernel
    gpu.cache[0].fill_(OLD)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gpu.cache[0].add_(1)
        meanwhile()
        gpu.cache[0].add_(1)
    return graph


def check_replay(gpu: GpuCache, graph: torch.cuda.CUDAGraph) -> None:
    for replays in (1, 2):
        graph.replay()
        torch.cuda.synchronize()
        assert only(gpu.cache[0]) == OLD + 2 * replays


# Another thread than the one that captures may do everything


def store_and_load(gpu: GpuCache) -> None:
    gpu.handler.synchronize(
        [
            gpu.handler.store(gpu_block_ids=[1], page_ids=[1]),
            gpu.handler.load(page_ids=[2], gpu_block_ids=[2]),
        ]
    )
    assert (gpu.page(1), gpu.page(2)) == (OLD, NEW)


def poll(gpu: GpuCache) -> None:
    hold = gpu.hold_on(gpu.side)
    job = gpu.handler.load(page_ids=[1], gpu_block_ids=[1], after=hold)
    assert gpu.handler.poll() == []
    hold.release()
    while not gpu.handler.poll():
        pass
    assert job.query()


def wait_on_a_stream(gpu: GpuCache) -> None:
    job = gpu.handler.load(
        page_ids=[1], gpu_block_ids=[1], after=gpu.slow_on(gpu.side, ms=20), layer_groups=1
    )
    job.wait(gpu.consumer)
    job.wait(gpu.consumer, layer_group=job.layer_group_of(0))
    gpu.handler.synchronize(job)


def fill_the_queue(gpu: GpuCache) -> None:
    busy = gpu.slow_on(gpu.side, ms=20)
    jobs = [gpu.handler.store(gpu_block_ids=[1], page_ids=[1], after=busy) for _ in range(300)]
    jobs[-1].wait(gpu.consumer)
    gpu.handler.synchronize(jobs)


def pin_and_close(gpu: GpuCache) -> None:
    with HostPool(gpu.layout, num_pages=64) as host:
        assert host.is_pinned


def make_and_close_a_handler(gpu: GpuCache) -> None:
    with gpu.another_handler() as handler:
        handler.store(gpu_block_ids=[1], page_ids=[1])
        handler.rebind(gpu.layout)
        handler.load(page_ids=[1], gpu_block_ids=[1], expedited=True)


def drop_a_handler(gpu: GpuCache) -> None:
    handler = gpu.another_handler()
    handler.store(gpu_block_ids=[1], page_ids=[1], after=gpu.slow_on(gpu.side, ms=20))
    del handler


ACTIONS = [
    store_and_load,
    poll,
    wait_on_a_stream,
    fill_the_queue,
    pin_and_close,
    make_and_close_a_handler,
    drop_a_handler,
]


@pytest.mark.parametrize("action", ACTIONS, ids=[action.__name__ for action in ACTIONS])
def test_a_capture_stays_valid_whatever_another_thread_does(
    gpu: GpuCache, action: Callable[[GpuCache], None]
) -> None:
    errors: list[BaseException] = []

    def work() -> None:
        try:
            with torch.cuda.stream(gpu.side):
                action(gpu)
        except BaseException as error:
            errors.append(error)

    # On a stream that is not captured everything works anyway; it loads the kernels as well.
    work()
    assert not errors
    torch.cuda.synchronize()
    gpu.handler.poll()
    gpu.cache.fill_(OLD)
    gpu.host.pages.fill_(NEW)
    torch.cuda.synchronize()
    thread = threading.Thread(target=work)

    def meanwhile() -> None:
        thread.start()
        thread.join(PATIENCE)

    graph = captured(gpu, meanwhile)
    assert not thread.is_alive()
    assert not errors, errors
    check_replay(gpu, graph)


# The thread that captures may look at jobs, and submit what waits for no captured stream


def test_while_capturing_jobs_can_be_looked_at(gpu: GpuCache) -> None:
    done = gpu.handler.load(page_ids=[1], gpu_block_ids=[1])
    gpu.handler.synchronize(done)
    gpu.handler.poll()
    unseen = gpu.handler.load(
        page_ids=[2], gpu_block_ids=[2]
    )  # torch.cuda.graph waits for it, but nobody looks

    def meanwhile() -> None:
        assert done.query()
        assert unseen.query()
        gpu.handler.synchronize([done, unseen])
        assert [result.job_id for result in gpu.handler.poll()] == [unseen.id]
        assert gpu.handler.poll() == []
        gpu.handler.synchronize()
        assert not gpu.handler.cancel(done)
        gpu.handler.metrics()

    check_replay(gpu, captured(gpu, meanwhile))


def test_a_captured_stream_cannot_be_waited_for(gpu: GpuCache) -> None:
    def meanwhile() -> None:
        for call in (
            lambda: gpu.handler.store(gpu_block_ids=[1], page_ids=[1]),
            lambda: gpu.handler.load(page_ids=[1], gpu_block_ids=[1]),
            lambda: gpu.handler.load(page_ids=[1], gpu_block_ids=[1], expedited=True),
            lambda: gpu.handler.load(
                page_ids=[1], gpu_block_ids=[1], after=torch.cuda.current_stream()
            ),
        ):
            with pytest.raises(RuntimeError, match="captur"):
                call()

    check_replay(gpu, captured(gpu, meanwhile))
    assert gpu.handler.poll() == []
    assert only(gpu.cache[1]) == OLD
    assert gpu.page(1) == NEW
    gpu.handler.synchronize(gpu.handler.store(gpu_block_ids=[1], page_ids=[1]))
    assert gpu.page(1) == OLD


def test_jobs_without_waits_are_submitted_while_capturing(gpu: GpuCache) -> None:
    event = gpu.side.record_event()

    def meanwhile() -> None:
        jobs = [
            gpu.handler.store(gpu_block_ids=[1], page_ids=[1], after=()),
            gpu.handler.load(page_ids=[2], gpu_block_ids=[2], after=()),
            gpu.handler.load(page_ids=[3], gpu_block_ids=[3], after=event, expedited=True),
        ]
        gpu.handler.synchronize(jobs, timeout=PATIENCE)
        assert all(job.query() for job in jobs)

    graph = captured(gpu, meanwhile)
    assert only(gpu.cache[2:]) == NEW
    assert gpu.page(1) == OLD
    gpu.cache[1:].fill_(OLD)
    gpu.host.pages.fill_(NEW + 1)
    check_replay(gpu, graph)
    assert only(gpu.cache[1:]) == OLD  # a replay loads and stores nothing
    assert only(gpu.host.pages) == NEW + 1
