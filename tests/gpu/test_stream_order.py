"""On a GPU: which work waits for which, what submitting costs, and how handlers end. That kernels
and transfers wait for each other is in test_fuzz_gpu.py, with controls.
"""

from __future__ import annotations

import pytest
import torch
from caller_submits import CallerSubmits
from gpu_cache import NEW, OLD, GpuCache, only
from patience import PATIENCE
from processes import run_script

pytestmark = pytest.mark.gpu


# The default stream, which the fuzz tests give no kernels


@pytest.mark.parametrize(("after", "stored"), [(None, NEW), ((), OLD)], ids=["waits", "control"])
def test_a_store_waits_for_the_writing_kernel(
    gpu: GpuCache, after: tuple[()] | None, stored: int
) -> None:
    gpu.hold()
    gpu.cache.fill_(NEW)
    job = gpu.handler.store(gpu_block_ids=[1], page_ids=[0], after=after)
    if after is None:
        gpu.release()
    gpu.handler.synchronize(job)
    assert gpu.page() == stored


def test_copy_seconds_are_those_of_the_copy(gpu: GpuCache) -> None:
    gpu.slow(200)
    job = gpu.handler.store(gpu_block_ids=[0, 1, 2, 3], page_ids=[0, 1, 2, 3])
    gpu.handler.synchronize(job)
    assert job.result is not None
    assert 0 < job.result.copy_seconds < 0.1
    assert 0 < job.result.submit_seconds < 0.1
    assert 0 <= job.result.queue_seconds < 0.1


# What submission leaves as it was


@pytest.mark.parametrize("method", ["batch", "strided", "staged"])
def test_many_layer_groups_do_not_fill_the_queue(method: str) -> None:
    layers = 32
    with (
        GpuCache(blocks=64, layers=layers) as gpu,
        CallerSubmits(gpu.layout, gpu.host, copy_method=method) as handler,
    ):
        ids = range(64)
        handler.synchronize(handler.load(page_ids=[0], gpu_block_ids=[0]))
        busy = gpu.slow_on(gpu.side)
        for j in ids:
            handler.load(page_ids=[j], gpu_block_ids=[j], after=gpu.side, layer_groups=layers)
        assert not busy.query()
        assert handler.metrics().loads.queued > 0
        handler.synchronize(timeout=PATIENCE)
        assert {only(layer) for layer in gpu.layers} == {NEW}


def test_jobs_take_no_gpu_memory(gpu: GpuCache) -> None:
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    for _ in range(50):
        gpu.handler.store(gpu_block_ids=[0, 1], page_ids=[0, 1])
        gpu.handler.load(page_ids=[2], gpu_block_ids=[3])
    gpu.handler.synchronize()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


# Ends


@pytest.mark.parametrize("copies", ["handler", "torch as a control"])
def test_an_exiting_process_waits_for_its_jobs(copies: str) -> None:
    script = """
        import weakref, torch
        from gpu_cache import GpuCache
        gpu = GpuCache(copy_method="batch")  # to free staging buffers waits by itself
        # At exit the newest finalizer comes first: this one behind the second handler's, before
        # those of the pool, which wait as well.
        weakref.finalize(gpu, lambda: print("slow kernel has ended:", busy.query()))
        second = gpu.another_handler()
        busy = gpu.slow(1000)
        if sys.argv[1] == "handler":
            second.store(gpu_block_ids=[1], page_ids=[0])
        else:
            gpu.host.pages[0].view(-1).copy_(gpu.cache[1], non_blocking=True)
    """
    assert (
        run_script(script, copies, ends_as_usual=True)
        == f"slow kernel has ended: {copies == 'handler'}\n"
    )


def test_a_lost_device_fails_all_jobs_at_once() -> None:
    script = """
        import os, torch
        from drained import drain
        from gpu_cache import GpuCache
        gpu = GpuCache()
        numbers, good, bad = (torch.tensor([n], device="cuda:0") for n in (5, 0, 99))
        numbers[good]  # loads the kernel, so that the next launch waits for nothing
        torch.cuda.synchronize()
        gpu.slow(500)
        numbers[bad]
        store, load = gpu.handler.store, gpu.handler.load
        jobs = [
            store(gpu_block_ids=[1], page_ids=[0]), load(page_ids=[1], gpu_block_ids=[1]),
            store(gpu_block_ids=[2], page_ids=[2]),
            load(page_ids=[2], gpu_block_ids=[3], expedited=True),
        ]
        jobs += [store(gpu_block_ids=[0], page_ids=[3]) for _ in range(100)]  # some of them in the software queue
        drain(gpu.handler)
        results = gpu.handler.poll()
        print(sorted(r.job_id for r in results) == [job.id for job in jobs])
        print({r.state for r in results}, all(job.query() for job in jobs))
        try:
            gpu.handler.store(gpu_block_ids=[1], page_ids=[0])
        except RuntimeError as error:
            print("lost" in str(error))
        gpu.handler.close()
        gpu.host.close()
        print("closed")  # which waits for nothing that the device would have to do
        sys.stdout.flush()
        os._exit(0)  # how torch itself ends on a lost device is not ours to test
    """
    assert run_script(script).splitlines() == ["True", "{'failed'} True", "True", "closed"]
