"""The driver calls of swap_blocks_batch, on the simulated driver."""

import re

import pytest
import simulated_driver
import torch
from expecttest import assert_expected_inline
from simulated_driver import DEVICE, HOST, error_of, simulated, without_cuda

from torch_kvswap import ops


@simulated
def test_one_call_carries_all_fragments_merged(driver):
    gpu, host = driver.memory(1024, DEVICE), driver.memory(1024, HOST)
    host.random_(1, 256)
    driver.set_stream(0, 70)
    offsets, sizes = torch.tensor([0, 64, 128, 512, 256]), torch.full((5,), 64)
    ops.swap_blocks_batch(host.data_ptr() + offsets, gpu.data_ptr() + offsets, sizes, True)
    assert_expected_inline(
        driver.log(),
        """\
push context of device 0
batch of 3 on stream 70, source order 3 from 0
pop context
""",
    )
    expected = torch.zeros_like(host)
    for offset in offsets.tolist():
        expected[offset : offset + 64] = host[offset : offset + 64]
    assert torch.equal(gpu, expected)


@simulated
def test_any_source_order_is_for_host_sources_only(driver):
    gpu, host = driver.memory(1024, DEVICE), driver.memory(1024, HOST)
    driver.set_stream(0, 70)
    a, b = gpu.data_ptr(), host.data_ptr()
    src = torch.tensor([b, b + 100, a, b + 200])
    dst = torch.tensor([a + 500, a + 600, b + 700, a + 800])
    for any_order in (True, False):
        ops.swap_blocks_batch(src, dst, torch.full((4,), 16), any_order)
    orders = re.findall("source order (.*)", driver.log())
    assert orders == ["3 from 0 1 from 2 3 from 3", "1 from 0"]


@simulated
def test_too_many_fragments_go_in_several_calls(driver):
    gpu, host = driver.memory(4096, DEVICE), driver.memory(4096, HOST)
    host.random_(0, 256)
    driver.set_stream(0, 70)
    offsets = torch.arange(0, 140 * 16, 16)
    sizes = torch.full_like(offsets, 8)
    ops.swap_blocks_batch(host.data_ptr() + offsets, gpu.data_ptr() + offsets, sizes)
    assert re.findall(r"batch of (\d+)", driver.log()) == ["32", "32", "32", "32", "12"]
    assert torch.equal(gpu[:2240].view(-1, 16)[:, :8], host[:2240].view(-1, 16)[:, :8])


def copy_two_fragments(driver):
    gpu, host = driver.memory(256, DEVICE), driver.memory(256, HOST)
    gpu.random_(1, 256)
    driver.set_stream(0, 70)
    offsets = torch.tensor([0, 128])
    sizes = torch.tensor([32, 48])
    ops.swap_blocks_batch(gpu.data_ptr() + offsets, host.data_ptr() + offsets, sizes)
    print(driver.log(), end="")
    print(torch.equal(gpu[128:176], host[128:176]), int(host[176:].sum()))


@without_cuda
def test_without_the_batch_copies_go_singly():
    assert_expected_inline(
        simulated_driver.run(copy_two_fragments, SIMULATED_WITHOUT="cuMemcpyBatchAsync"),
        """\
push context of device 0
copy 32 bytes on stream 70
copy 48 bytes on stream 70
pop context
True 0
""",
    )


@without_cuda
def test_the_legacy_default_stream_is_served_beside_it():
    def body(driver):
        gpu, host = driver.memory(256, DEVICE, 1), driver.memory(256, HOST)
        offsets, sizes = torch.tensor([0, 128]), torch.tensor([32, 48])
        for stream in (0, 1, 2):  # null, legacy and per-thread
            driver.set_stream(1, stream)
            ops.swap_blocks_batch(gpu.data_ptr() + offsets, host.data_ptr() + offsets, sizes)
            print(driver.log())

    assert_expected_inline(
        simulated_driver.run(body),
        """\
push context of device 1
create stream 101, of priority -5
record event 1 on stream 0 of GPU 1
wait for event 1 on stream 101
batch of 2 on stream 101, source order 1 from 0
record event 2 on stream 101
wait for event 2 on stream 0 of GPU 1
pop context

push context of device 1
record event 3 on stream 1 of GPU 1
wait for event 3 on stream 101
batch of 2 on stream 101, source order 1 from 0
record event 4 on stream 101
wait for event 4 on stream 1 of GPU 1
pop context

push context of device 1
batch of 2 on stream 2 of GPU 1, source order 1 from 0
pop context

""",
    )


@simulated
def test_pageable_memory_is_waited_for(driver):
    gpu, host = driver.memory(256, DEVICE), torch.arange(256, dtype=torch.uint8)
    driver.set_stream(0, 70)
    offsets, sizes = torch.tensor([0, 128]), torch.tensor([32, 48])
    ops.swap_blocks_batch(host.data_ptr() + offsets, gpu.data_ptr() + offsets, sizes)
    assert_expected_inline(
        driver.log(),
        """\
push context of device 0
copy 32 bytes on stream 70
copy 48 bytes on stream 70
synchronize stream 70
pop context
""",
    )
    assert torch.equal(gpu[128:176], host[128:176])


@simulated
def test_merging_stops_at_the_end_of_an_allocation(driver):
    host = driver.memory(512, HOST)
    gpu = torch.zeros(512, dtype=torch.uint8)
    driver.adopt(gpu[:256], DEVICE)
    driver.adopt(gpu[256:], DEVICE)
    driver.set_stream(0, 70)
    offsets, sizes = torch.arange(0, 512, 64), torch.full((8,), 64)
    ops.swap_blocks_batch(host.data_ptr() + offsets, gpu.data_ptr() + offsets, sizes)
    assert "batch of 2 on stream 70" in driver.log()


@simulated
def test_capture_records_singly_and_refuses_pageable(driver):
    gpu, host = driver.memory(256, DEVICE), driver.memory(256, HOST)
    pageable = torch.zeros(256, dtype=torch.uint8)
    driver.set_stream(0, 70)
    driver.set_capturing(True)
    offsets, sizes = torch.tensor([0, 128]), torch.tensor([32, 48])
    ops.swap_blocks_batch(gpu.data_ptr() + offsets, host.data_ptr() + offsets, sizes)
    message = error_of(
        lambda: ops.swap_blocks_batch(
            gpu.data_ptr() + offsets, pageable.data_ptr() + offsets, sizes
        )
    )
    assert_expected_inline(
        message,
        """torch_kvswap::swap_blocks_batch: the current stream is being captured into a CUDA graph, which cannot hold copies of pageable host memory; pin the memory or copy outside the capture""",
    )
    assert_expected_inline(
        driver.log(),
        """\
push context of device 0
copy 32 bytes on stream 70
copy 48 bytes on stream 70
pop context
push context of device 0
pop context
""",
    )


def fail_the_third_copy(driver):
    gpu, host = driver.memory(1024, DEVICE), driver.memory(1024, HOST)
    driver.set_stream(0, 70)
    driver.fail_copy(2)
    # Fragments 0 and 1 are one copy after merging; the third copy is fragment 3.
    offsets, sizes = torch.tensor([0, 64, 256, 512, 768]), torch.full((5,), 64)
    src, dst = host.data_ptr() + offsets, gpu.data_ptr() + offsets
    print(error_of(lambda: ops.swap_blocks_batch(src, dst, sizes)))


@pytest.mark.parametrize(
    ("call", "without"), [("cuMemcpyBatchAsync", ""), ("cuMemcpyAsync", "cuMemcpyBatchAsync")]
)
@without_cuda
def test_a_driver_error_names_call_and_index(call, without):
    assert simulated_driver.run(fail_the_third_copy, SIMULATED_WITHOUT=without).strip() == (
        f"torch_kvswap::swap_blocks_batch: {call} failed at index 3, from 0x~ (pinned host memory, "
        "allocation 0x~ + 1024 bytes) to 0x~ (device 0, allocation 0x~ + 1024 bytes), 64 bytes: "
        "CUDA_ERROR_SIMULATED (1): made up by the simulated driver"
    )


@simulated
def test_an_address_on_a_second_device_is_refused(driver):
    host = driver.memory(256, HOST)
    first, second = driver.memory(256, DEVICE, 0), driver.memory(256, DEVICE, 1)
    src = torch.tensor([host.data_ptr(), host.data_ptr() + 64])
    dst = torch.tensor([first.data_ptr(), second.data_ptr()])
    assert error_of(lambda: ops.swap_blocks_batch(src, dst, torch.tensor([64, 64]))) == (
        "torch_kvswap::swap_blocks_batch: dst_ptrs[1] is 0x~ (device 1, allocation 0x~ + 256 "
        "bytes), but the first device address lies on device 0; one call copies for one device"
    )
    assert driver.log() == ""


@simulated
def test_checked_addresses_may_cross_mappings(driver):
    host = driver.memory(1024, HOST)
    gpu = torch.zeros(1024, dtype=torch.uint8)
    driver.adopt(gpu[:256], DEVICE)
    driver.adopt(gpu[256:512], DEVICE)
    driver.set_stream(0, 70)

    def error(offset, size):
        src, dst = torch.tensor([host.data_ptr()]), torch.tensor([gpu.data_ptr() + offset])
        return error_of(lambda: ops.swap_blocks_batch(src, dst, torch.tensor([size])))

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVSWAP_CHECK_ADDRESSES", "1")
        assert error(192, 128) == error(600, 8) == "no error"
        assert error(192, 400) == (
            "torch_kvswap::swap_blocks_batch: dst_ptrs[0] is 0x~ (device 0, allocation 0x~ + 256 "
            "bytes), and of its 400 bytes only the first 320 lie in memory that can be written"
        )


@without_cuda
def test_before_cuda_every_address_is_host_memory():
    def body(driver):
        driver.set_initialized(False)
        src, dst = torch.arange(64, dtype=torch.uint8), torch.zeros(64, dtype=torch.uint8)
        one = torch.tensor([64])
        ops.swap_blocks_batch(torch.tensor([src.data_ptr()]), torch.tensor([dst.data_ptr()]), one)
        print(torch.equal(src, dst), repr(driver.log()))

    assert_expected_inline(
        simulated_driver.run(body),
        """\
True ''
""",
    )


@pytest.mark.parametrize("who", ["the library", "somebody else"])
@without_cuda
def test_a_forked_child_after_cuda_is_refused(who):
    def body(driver):
        import os

        gpu = driver.memory(64, DEVICE)
        src, dst, size = (torch.tensor([v]) for v in (gpu.data_ptr(), gpu.data_ptr() + 32, 16))
        driver.set_stream(0, 70)
        if os.environ["WHO"] == "the library":
            ops.swap_blocks_batch(src, dst, size)
        child = os.fork()
        if child == 0:
            driver.set_initialized(False)  # as the driver answers in a forked child
            print(error_of(lambda: ops.swap_blocks_batch(src, dst, size)), flush=True)
            os._exit(0)
        os.waitpid(child, 0)

    assert_expected_inline(
        simulated_driver.run(body, WHO=who),
        """\
torch_kvswap::swap_blocks_batch: process N was forked from process N, which used CUDA, and cannot use CUDA itself; start it with the spawn method
""",
    )


@simulated
def test_an_unknown_environment_value_is_refused(driver):
    gpu = driver.memory(64, DEVICE)
    src, dst = torch.tensor([gpu.data_ptr()] * 2), torch.tensor([gpu.data_ptr() + 32] * 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVSWAP_CHECK_ADDRESSES", "off")
        message = error_of(lambda: ops.swap_blocks_batch(src, dst, torch.tensor([8, 8])))
    assert message == (
        "torch_kvswap::swap_blocks_batch: KVSWAP_CHECK_ADDRESSES is 'off'; it must be 0 or 1"
    )


def log_of_a_failed_copy(driver, host):
    """What the driver was asked for when the second copy fails."""
    gpu = driver.memory(256, DEVICE)
    driver.fail_copy(1)
    src, dst = (tensor.data_ptr() + torch.tensor([0, 128]) for tensor in (gpu, host))
    error = error_of(lambda: ops.swap_blocks_batch(src, dst, torch.tensor([32, 48])))
    assert "failed at index 1" in error
    return driver.log()


@without_cuda
def test_after_an_error_the_legacy_stream_still_waits():
    def body(driver):
        from test_batch import log_of_a_failed_copy

        driver.set_stream(0, 0)
        print(log_of_a_failed_copy(driver, driver.memory(256, HOST)), end="")

    assert_expected_inline(
        simulated_driver.run(body),
        """\
push context of device 0
create stream 101, of priority -5
record event 1 on stream 0
wait for event 1 on stream 101
batch of 2 on stream 101, source order 1 from 0
record event 2 on stream 101
wait for event 2 on stream 0
pop context
""",
    )


@simulated
def test_after_an_error_pageable_memory_is_waited_for(driver):
    driver.set_stream(0, 70)
    assert_expected_inline(
        log_of_a_failed_copy(driver, torch.zeros(256, dtype=torch.uint8)),
        """\
push context of device 0
copy 32 bytes on stream 70
synchronize stream 70
pop context
""",
    )
