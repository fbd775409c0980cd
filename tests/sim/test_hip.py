"""A PyTorch for ROCm: AMD's HIP runtime in the place of the CUDA driver, on the simulated driver.

Most tests of it are those of the CUDA driver that are marked @simulated_on_both. Here is what is
different.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import simulated_driver
import torch
from error_text import error_text
from expecttest import assert_expected_inline
from simulated_cache import SIDE, SimulatedCache, Stream, states
from simulated_driver import (
    DEVICE,
    HOST,
    Driver,
    cache,
    error_of,
    on_device,
    pool,
    simulated_on_hip,
    without_cuda,
)

from torch_kvswap import OffloadHandler, ops
from torch_kvswap._native.loader import native
from torch_kvswap.cli import doctor

pytestmark = without_cuda
ROOT = Path(__file__).parents[2]


def run(body: Callable[[Driver], None], **variables: str) -> str:
    """What the body prints in a process of its own, with a HIP runtime."""
    return simulated_driver.run(body, **{"SIMULATED_FACE": "hip", **variables})


@simulated_on_hip
def test_a_round_trip_leaves_the_bytes_as_they_were(driver: Driver) -> None:
    layout, host = cache(driver, layers=3)
    kept = [tensor.clone() for tensor in layout.tensors]
    with OffloadHandler(layout, host) as handler:
        handler.synchronize(handler.store(gpu_block_ids=[3, 1, 9], page_ids=[0, 5, 2]))
        for tensor in layout.tensors:
            tensor.zero_()
        handler.synchronize(handler.load(page_ids=[0, 5, 2], gpu_block_ids=[3, 1, 9]))
    for tensor, before in zip(layout.tensors, kept, strict=True):
        assert torch.equal(tensor[[3, 1, 9]], before[[3, 1, 9]])
        assert not tensor[[0, 2]].any()


@simulated_on_hip
def test_the_cuda_driver_is_not_looked_for(driver: Driver) -> None:
    layout, host = cache(driver)
    with OffloadHandler(layout, host) as handler:
        handler.synchronize(handler.store(gpu_block_ids=[0], page_ids=[0]))
    loaded = Path("/proc/self/maps").read_text()
    assert "libamdhip64" in loaded
    assert "libcuda.so" not in loaded


@simulated_on_hip
def test_the_current_device_of_the_thread_is_the_callers_again(driver: Driver) -> None:
    hip = driver.torch_cuda  # which is linked with HIP
    assert hip.hipSetDevice(1) == 0
    try:
        with SimulatedCache(driver) as sim:
            before = driver.calls("hipSetDevice")
            sim.load(1, 1).wait(Stream(SIDE))
            assert driver.calls("hipSetDevice") > before  # the handler is of device 0
            assert states(sim.finish()) == ["done"]
        assert hip.simulated_current_device() == 1
    finally:
        assert hip.hipSetDevice(0) == 0


@simulated_on_hip
def test_an_error_that_is_handled_is_not_found_by_the_next_kernel_launch(driver: Driver) -> None:
    hip = driver.torch_cuda
    with SimulatedCache(driver) as sim:
        hold = sim.held()
        job = sim.store(1, 1, after=None)
        assert not job.query()  # the event is not ready
        sim.release(hold)
        driver.fail("cuMemcpyAsync")
        failed = sim.store(2, 2, after=())
        assert failed.query()
        assert hip.simulated_last_error() == 0
        assert hip.hipEventQuery(None) != 0  # as a control, what the application asks
        assert hip.simulated_last_error() != 0
        assert hip.hipGetLastError() != 0
        sim.finish()


# The batch call


def scattered(driver: Driver, copies: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Addresses and sizes of copies from the device to the host. No two copies are adjacent."""
    gpu, host = driver.memory(32 * copies, DEVICE), driver.memory(32 * copies, HOST)
    gpu.random_()
    offsets = 32 * torch.arange(copies)
    sizes = torch.full((copies,), 16)
    return gpu.data_ptr() + offsets, host.data_ptr() + offsets.flip(0), sizes


def test_no_call_has_more_than_8192_copies_whatever_the_limit() -> None:
    def body(driver: Driver) -> None:
        from test_hip import scattered

        driver.set_stream(0, 70)
        ops.swap_blocks_batch(*scattered(driver, 20000))
        calls = [line for line in driver.log().splitlines() if "batch" in line]
        print(*[line.split(" on ")[0] for line in calls], sep="\n")
        print(driver.violations())

    expected = "batch of 8192\nbatch of 8192\nbatch of 3616\n0\n"
    assert run(body, KVSWAP_BATCH_LIMIT="20000") == expected


def test_before_rocm_7_1_each_fragment_is_a_call() -> None:
    def body(driver: Driver) -> None:
        from test_hip import scattered

        from torch_kvswap._native.loader import native

        driver.set_stream(0, 70)
        src, dst, sizes = scattered(driver, 3)
        ops.swap_blocks_batch(src, dst, sizes)
        print(driver.log(), end="")
        print(native.driver_has_batch())

    assert_expected_inline(
        run(body, SIMULATED_FACE="hip 7.0"),
        """\
copy 16 bytes on stream 70
copy 16 bytes on stream 70
copy 16 bytes on stream 70
False
""",
    )


def test_a_handler_says_that_the_runtime_has_no_batch_call() -> None:
    def body(driver: Driver) -> None:
        from logged import logged
        from simulated_driver import cache

        from torch_kvswap import OffloadHandler

        with logged() as messages, OffloadHandler(*cache(driver)):
            print(*messages, sep="\n")

    assert_expected_inline(
        run(body, SIMULATED_FACE="hip 7.0"),
        """\
the HIP runtime is older than ROCm 7.1 and has no hipMemcpyBatchAsync: copies of scattered blocks take one driver call per fragment; update ROCm
""",
    )


def test_a_source_order_is_not_passed_on_and_copies_keep_that_of_the_stream() -> None:
    def body(driver: Driver) -> None:
        gpu, host = driver.memory(256, DEVICE), driver.memory(256, HOST)
        driver.set_stream(0, 70)
        offsets, sizes = torch.tensor([0, 128]), torch.tensor([32, 48])
        ops.swap_blocks_batch(host.data_ptr() + offsets, gpu.data_ptr() + offsets, sizes, True)
        print(driver.log(), end="")

    assert_expected_inline(run(body), "batch of 2 on stream 70, source order 1 from 0\n")


# What HIP says of memory


@simulated_on_hip
def test_registered_memory_has_an_extent_although_hip_says_no_base(driver: Driver) -> None:
    memory = torch.zeros(4 << 20, dtype=torch.uint8)
    native.register_host(0, memory.data_ptr(), memory.nbytes)
    layout, _ = cache(driver, layers=1)
    gpu = layout.tensors[0]
    source, pages = gpu.data_ptr() + 64 * torch.arange(2), memory.data_ptr() + 64 * torch.arange(2)
    driver.set_stream(0, 70)
    torch.ops.torch_kvswap.swap_blocks_batch(source, pages, torch.full((2,), 64))
    # Neighbours on both sides are one copy only inside of one allocation.
    assert "copy 128 bytes on stream 70" in driver.log()
    assert torch.equal(memory[:128], gpu[:2].view(-1))
    native.unregister_host(0, memory.data_ptr())


@pytest.mark.parametrize("checked", ["1", "0"])
def test_memory_of_which_hip_says_no_extent_is_copied_fragment_by_fragment(checked: str) -> None:
    def body(driver: Driver) -> None:
        gpu, host = driver.memory(256, DEVICE), driver.memory(256, HOST)
        driver.set_stream(0, 70)
        for nth in range(1, 9):
            driver.fail("hipMemGetAddressRange", nth)
        offsets = torch.tensor([0, 64])
        ops.swap_blocks_batch(
            host.data_ptr() + offsets, gpu.data_ptr() + offsets, torch.tensor([64, 64])
        )
        print(driver.log(), torch.equal(gpu[:128], host[:128]))

    assert "batch of 2" in run(body, KVSWAP_CHECK_ADDRESSES=checked)


def test_without_a_device_of_amd_every_address_is_host_memory() -> None:
    def body(driver: Driver) -> None:
        driver.set_initialized(False)
        src, dst = torch.arange(64, dtype=torch.uint8), torch.zeros(64, dtype=torch.uint8)
        one = torch.tensor([64])
        ops.swap_blocks_batch(torch.tensor([src.data_ptr()]), torch.tensor([dst.data_ptr()]), one)
        print(torch.equal(src, dst), repr(driver.log()))

    assert run(body) == "True ''\n"


def test_a_forked_child_of_a_process_that_used_hip_is_refused() -> None:
    def body(driver: Driver) -> None:
        import os

        gpu = driver.memory(64, DEVICE)
        src, dst, size = (torch.tensor([v]) for v in (gpu.data_ptr(), gpu.data_ptr() + 32, 16))
        driver.set_stream(0, 70)
        ops.swap_blocks_batch(src, dst, size)
        for _ in range(2):  # the child, and its child
            child = os.fork()
            if child == 0:
                print(error_of(lambda: ops.swap_blocks_batch(src, dst, size)), flush=True)
                continue
            os.waitpid(child, 0)
            os._exit(0)

    error = (
        "torch_kvswap::swap_blocks_batch: process N was forked from process N, which used CUDA, "
        "and cannot use CUDA itself; start it with the spawn method\n"
    )
    assert run(body) == 2 * error


# Strided copies


@simulated_on_hip
def test_layers_at_equal_distances_are_one_copy_a_block(driver: Driver) -> None:
    layout = on_device(driver, torch.randint(256, (4, 16, 64), dtype=torch.uint8))
    host = pool(driver, layout, 8)
    with OffloadHandler(layout, host, copy_method="strided") as handler:
        driver.log()
        handler.synchronize(handler.store(gpu_block_ids=[3, 5], page_ids=[1, 2]))
        assert driver.log().count("strided copy of 4 x 64 bytes on stream") == 2
        pages = host.pages.view(8, 4, 64)
        for block, page in ((3, 1), (5, 2)):
            assert torch.equal(pages[page], torch.stack([t[block] for t in layout.tensors]))


@simulated_on_hip
def test_layers_more_than_two_gib_apart_are_a_copy_each(driver: Driver) -> None:
    distance = 3 << 30
    whole = torch.empty(2 * distance, dtype=torch.uint8).view(2, distance)  # never touched
    rows = [whole[layer, : 16 * 64].view(16, 64) for layer in range(2)]
    for row in rows:
        row.random_()
    layout = on_device(driver, whole, rows)
    host = pool(driver, layout, 4)
    with OffloadHandler(layout, host, copy_method="strided") as handler:
        driver.log()
        handler.synchronize(handler.store(gpu_block_ids=[3], page_ids=[1]))
        assert driver.log().count("copy 64 bytes on stream") == 2
        assert torch.equal(host.pages.view(4, 2, 64)[1], torch.stack([row[3] for row in rows]))


# What is missing


@pytest.mark.parametrize("copy_method", ["staged", "kernel"])
@simulated_on_hip
def test_methods_with_kernels_are_refused_by_name(driver: Driver, copy_method: str) -> None:
    layout, host = cache(driver)
    error = error_text(OffloadHandler, layout, host, copy_method=copy_method)
    assert " ".join(error.split()) == (
        f"ValueError: copy_method='{copy_method}' is no copy method of CUDA device 0; it can be "
        "auto, strided, batch"
    )


@simulated_on_hip
def test_methods_with_kernels_are_never_chosen_and_nothing_is_logged(driver: Driver) -> None:
    layout, host = cache(driver, num_blocks=512, num_pages=512, layers=16)
    with OffloadHandler(layout, host) as handler:
        for count in (1, 8, 64, 512):
            handler.synchronize(
                handler.store(gpu_block_ids=list(range(count)), page_ids=list(range(count)))
            )
        methods = {result.copy_method for result in handler.poll()}
    assert methods <= {"strided", "batch"}


@simulated_on_hip
def test_a_gate_is_refused_and_a_load_can_be_waited_for(driver: Driver) -> None:
    with SimulatedCache(driver) as sim:
        assert " ".join(error_text(sim.handler.gate).split()) == (
            "RuntimeError: the streams of CUDA device 0 cannot wait for a word of memory, which a "
            "gate needs; let a stream wait for each job instead"
        )
        sim.load(1, 2).wait(Stream(SIDE))
        assert states(sim.finish()) == ["done"]


def test_ids_on_a_device_are_not_expanded() -> None:
    def body(driver: Driver) -> None:
        from simulated_driver.tensors import on_gpu

        ids = on_gpu(driver.memory(64, DEVICE), 0).view(torch.int64)
        out = on_gpu(driver.memory(128, DEVICE), 0).view(torch.int64)
        print(error_of(lambda: ops.expand_block_ids(ids, 2, out=out)))

    assert "the kernels of this library are for NVIDIA's GPUs" in run(body)


# What is said


def test_doctor_says_which_runtime_is_used() -> None:
    def body(driver: Driver) -> None:
        from torch_kvswap.cli import doctor

        report = doctor.report()
        for topic in ("CUDA driver", "CUDA kernels", "scattered copies"):
            print(f"{topic}: {report[topic]}")

    assert_expected_inline(
        run(body),
        """\
CUDA driver: HIP 7.2, not tried on AMD's hardware yet (docs/hip.md)
CUDA kernels: none: they are for NVIDIA's GPUs, so nothing is staged, and expand_block_ids takes CPU ids only
scattered copies: hipMemcpyBatchAsync, 32 fragments a call
""",
    )
    assert_expected_inline(
        run(body, SIMULATED_FACE="hip 7.0").splitlines()[-1],
        """scattered copies: one call per fragment: the driver is older than ROCm 7.1""",
    )


def test_doctor_says_which_hip_pytorch_was_built_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", "7.2.26015")
    assert doctor.report()["PyTorch"] == f"{torch.__version__} (HIP 7.2.26015)"


@simulated_on_hip
def test_the_place_of_a_device_on_the_bus_is_asked_with_hips_numbers(driver: Driver) -> None:
    for attribute, value in ((50, 1), (33, 0xC3), (34, 2)):  # as the CUDA driver numbers them
        driver.set_attribute(attribute, value)
    assert native.pci_address(0) == (1, 0xC3, 2)


def test_errors_have_hips_names_of_all_functions_that_hip_has() -> None:
    """What a message may name, and what only kernels and gates call."""
    without = {
        *("cuDevicePrimaryCtxRetain", "cuFuncSetAttribute", "cuLaunchKernel", "cuMemAlloc"),
        *("cuMemHostAlloc", "cuModuleGetFunction", "cuModuleLoadData"),
        *("cuStreamWaitValue64", "cuStreamWriteValue64"),
    }
    sources = [path for path in (ROOT / "csrc").rglob("*.cpp") if path.name != "hip.cpp"]
    named = {
        name
        for path in sources
        if path.name != "driver.cpp"
        for name in re.findall(r'"(cu[A-Z]\w+)', path.read_text())
    }
    table = dict(re.findall(r'\{"(cu\w+)", "(hip\w+)"\}', (ROOT / "csrc/cuda/hip.cpp").read_text()))
    assert named - without == {*table}


@simulated_on_hip
def test_each_fragment_of_a_batch_counts_as_an_entry_in_the_queue(driver: Driver) -> None:
    """A batch call of HIP is a loop of copies."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("KVSWAP_COPY_METHOD", "batch")
        sim = SimulatedCache(driver, blocks=99, pages=99)
    with sim:
        hold = sim.held(SIDE)
        for _ in range(20):
            sim.submit("store", range(0, 99, 2), range(0, 99, 2), after=Stream(SIDE))
        now = sim.metrics("store")
        assert (now.running, now.queued) == (700 // (1 + 50), 20 - 700 // (1 + 50))
        sim.release(hold)
        assert states(sim.finish()) == ["done"] * 20
        assert sim.is_right()
