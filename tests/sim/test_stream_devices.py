"""A stream is a handle and a device: the handles 0, 1 and 2 mean a different stream on each GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from error_text import error_text
from expecttest import assert_expected_inline
from simulated_cache import CURRENT, SimulatedCache, Stream
from simulated_driver import DEVICE, Driver, run, simulated, without_cuda

from torch_kvswap.offload.handler import Job

DEFAULT = {"null": 0, "legacy": 1, "per-thread": 2}
STREAMS = pytest.mark.parametrize("name", [*DEFAULT, "created"])


def stream_of(driver: Driver, gpu: int, name: str) -> Stream:
    with driver.on(gpu):
        return Stream(driver.cuda.create_stream() if name == "created" else DEFAULT[name], gpu)


def is_idle(driver: Driver, stream: Stream) -> bool:
    with driver.on(stream.device.index):
        return driver.cuda.is_done(stream=stream.cuda_stream)


def read_block(sim: SimulatedCache, stream: Stream, block: int) -> torch.Tensor:
    """What a kernel on the stream finds in the block, once it has run."""
    gpu = stream.device.index
    found = sim.driver.memory(64, DEVICE, gpu)
    with sim.driver.on(gpu):
        sim.driver.cuda.enable_peer_access(0)
        sim.driver.cuda.copy(found, sim.tensors[0][block], stream.cuda_stream)
    return found


WAITS: dict[str, Callable[[Job, Stream], None]] = {
    "job": lambda job, stream: job.wait(stream),
    "layer group": lambda job, stream: job.wait(stream, layer_group=job.layer_group_of(0)),
    "control": lambda job, stream: None,
}


@STREAMS
@pytest.mark.parametrize("wait", WAITS)
@simulated
def test_a_stream_of_another_gpu_can_wait(driver: Driver, name: str, wait: str) -> None:
    with SimulatedCache(driver) as sim:
        stream = stream_of(driver, 1, name)
        before = sim.block(1)
        hold, job = sim.hold_up("load", block=1, page=2)
        WAITS[wait](job, stream)
        found = read_block(sim, stream, block=1)
        driver.run()
        assert is_idle(driver, stream) == (wait == "control")
        # The stream of that handle on the handler's GPU goes on.
        assert name == "created" or is_idle(driver, stream_of(driver, 0, name))
        sim.release(hold)
        sim.finish()
        assert torch.equal(found, before if wait == "control" else sim.page(2))


@pytest.mark.parametrize("name", DEFAULT)
@simulated
def test_a_capturing_waiter_is_refused_on_any_gpu(driver: Driver, name: str) -> None:
    with SimulatedCache(driver) as sim:
        hold, job = sim.hold_up("load")
        other = stream_of(driver, 1, name)
        with driver.on(1):
            driver.set_capturing(True, other.cuda_stream)
        job.wait(stream_of(driver, 0, name))  # that is another stream
        assert "capturing a graph" in error_text(lambda: job.wait(other))
        with driver.on(1):
            driver.set_capturing(False, other.cuda_stream)
        driver.set_capturing(True, DEFAULT[name])
        job.wait(other)
        driver.set_capturing(False, DEFAULT[name])
        sim.release(hold)


@pytest.mark.parametrize("state", ["queued", "running", "ended", "ended and reported"])
@pytest.mark.parametrize("gpu", [0, 1])
@simulated
def test_a_capturing_stream_is_refused_even_when_ended(
    driver: Driver, state: str, gpu: int
) -> None:
    with SimulatedCache(driver) as sim:
        stream = stream_of(driver, gpu, "created")
        hold = sim.held()
        if state == "queued":
            sim.fill("load")
        job = sim.load(1, 2, after=Stream(CURRENT))
        if "ended" in state:
            sim.release(hold)
            sim.finish() if "reported" in state else driver.run()
        with driver.on(gpu):
            driver.set_capturing(True, stream.cuda_stream)
        for wait in (
            Job.wait,
            lambda job, stream: job.wait(stream, layer_group=job.layer_group_of(0)),
        ):
            assert "captur" in error_text(wait, job, stream)
        with driver.on(gpu):
            driver.set_capturing(False, stream.cuda_stream)
        job.wait(stream)
        sim.release(hold)
        sim.finish()


class TwoGpus:
    """A block on GPU 0, one on GPU 1, and a stream of each that swap_blocks runs on."""

    def __init__(self, driver: Driver, names: tuple[str, str]) -> None:
        from simulated_driver.tensors import on_gpu

        driver.set_mode("manual")
        self.driver = driver
        self.memory = [driver.memory(64, DEVICE, gpu) for gpu in (0, 1)]
        self.blocks = [on_gpu(self.memory[gpu].view(1, 64), gpu) for gpu in (0, 1)]
        self.streams = [stream_of(driver, gpu, name).cuda_stream for gpu, name in enumerate(names)]
        for gpu, stream in enumerate(self.streams):
            driver.set_stream(gpu, stream)
            with driver.on(gpu):  # as PyTorch does for its own copies between GPUs
                driver.cuda.enable_peer_access(1 - gpu)

    def fill(self, gpu: int, value: int) -> None:
        """A kernel on the GPU's stream writes its block."""
        with self.driver.on(gpu):
            values = self.driver.memory(64, DEVICE, gpu).fill_(value)
            self.driver.cuda.copy(self.memory[gpu], values, self.streams[gpu])

    def swap(self) -> None:
        from torch_kvswap import ops

        ops.swap_blocks(self.blocks[0], self.blocks[1], 64, torch.tensor([[0, 0]]))

    def copy_unordered(self) -> None:
        with self.driver.on(1):
            self.driver.cuda.copy(self.memory[1], self.memory[0], self.streams[1])

    def bytes_after(self, copy: Callable[[], None], busy: int) -> tuple[int, int]:
        """In the source and in the destination: both were written before the copy, the source again
        behind it, and the stream of the `busy` GPU was late. In order that gives 3 and 1."""
        with self.driver.on(busy):
            hold = self.driver.hold(self.streams[busy])
        self.fill(0, 1)
        self.fill(1, 2)
        copy()
        self.fill(0, 3)
        self.driver.run()
        with self.driver.on(busy):
            self.driver.release(hold)
        self.driver.run()
        return int(self.memory[0][0]), int(self.memory[1][0])


def swap_between_gpus(driver: Driver) -> None:
    from itertools import product

    from test_stream_devices import DEFAULT, TwoGpus

    names = [*DEFAULT, "created"]
    for source, destination, busy in product(names, names, (0, 1)):
        gpus = TwoGpus(driver, (source, destination))
        print(gpus.bytes_after(gpus.swap, busy))
        assert not driver.violations()
        driver.reset()
    for busy in (0, 1):
        gpus = TwoGpus(driver, ("created", "created"))
        print("control", gpus.bytes_after(gpus.copy_unordered, busy))
        driver.reset()


@without_cuda
def test_swaps_between_gpus_are_ordered_on_streams() -> None:
    lines = run(swap_between_gpus).splitlines()
    assert lines == ["(3, 1)"] * 32 + ["control (3, 0)", "control (3, 3)"]


def fail_between_gpus(driver: Driver) -> None:
    from simulated_driver import error_of
    from test_stream_devices import TwoGpus

    gpus = TwoGpus(driver, ("created", "created"))
    driver.fail_copy(0)
    print(error_of(gpus.swap))


@without_cuda
def test_a_failed_copy_between_gpus_is_an_error() -> None:
    assert_expected_inline(
        run(fail_between_gpus),
        """\
torch_kvswap::swap_blocks: cuMemcpyPeerAsync failed at index 0, from 0x~ (device 0, allocation 0x~ + 64 bytes) to 0x~ (device 1, allocation 0x~ + 64 bytes), 64 bytes: CUDA_ERROR_SIMULATED (1): made up by the simulated driver
""",
    )
