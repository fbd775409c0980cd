"""The C interface: its declarations in Python, its errors, and what it reports about the driver."""

import ctypes
import os
import re
import shlex
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import simulated_driver
import torch
from expecttest import assert_expected_inline
from simulated_driver import HOST, error_of, simulated, without_cuda

from torch_kvswap._native import abi, loader
from torch_kvswap.handler import OffloadHandler
from torch_kvswap.host_pool.pool import HostPool
from torch_kvswap.layout import PagedLayout

CSRC = Path(__file__).parents[3] / "csrc"
HEADER = CSRC / "capi.h"
STRUCTURES = {
    "kvswap_ready_range": abi.ReadyRange,
    "kvswap_group": abi.Group,
    "kvswap_copy_method_costs": abi.CopyMethodCosts,
    "kvswap_copy_method_options": abi.CopyMethodOptions,
    "kvswap_request": abi.Request,
    "kvswap_result": abi.JobResult,
    "kvswap_ended": abi.Ended,
    "kvswap_slot_format": abi.SlotFormat,
    "kvswap_unended": abi.Unended,
    "kvswap_histogram": abi.Histogram,
    "kvswap_metrics": abi.Metrics,
    "kvswap_blocks_group": abi.BlocksGroup,
    "kvswap_blocks_options": abi.BlocksOptions,
    "kvswap_blocks_lookup_result": abi.BlocksLookupResult,
    "kvswap_blocks_event": abi.BLOCKS_EVENT,
    "kvswap_blocks_stats": abi.BlocksStats,
}


def layout_of(structure: Any) -> tuple[int, dict[str, tuple[int, int]]]:
    """Its size, and the offset and size of each field."""
    if isinstance(structure, np.dtype):
        fields = {name: (offset, of.itemsize) for name, (of, offset) in structure.fields.items()}
        return structure.itemsize, fields
    places = {field: getattr(structure, field) for field, *_ in structure._fields_}
    fields = {field: (place.offset, place.size) for field, place in places.items()}
    return ctypes.sizeof(structure), fields


def failure() -> tuple[str, str]:
    """Type and text of the calling thread's last error."""
    library = loader.library()
    return library.kvswap_last_error_type().decode(), library.kvswap_last_error().decode()


# What Python believes of it


def test_python_knows_every_function_and_how_many_arguments_it_takes():
    text = HEADER.read_text()
    declared = re.findall(r"KVSWAP_API [\w *]+?\b(kvswap_\w+)\(([^)]*)\);", text)
    assert {
        name: len(arguments.split(",")) if arguments else 0 for name, arguments in declared
    } == {name: len(types) - 1 for name, types in abi.PROTOTYPES.items()}


@pytest.mark.parametrize("name", STRUCTURES)
def test_a_structure_is_the_same_in_python_and_in_the_header(name, tmp_path):
    size, fields = layout_of(STRUCTURES[name])
    lines = [f"static_assert(sizeof({name}) == {size});"]
    for field, (offset, nbytes) in fields.items():
        lines += [
            f"static_assert(offsetof({name}, {field}) == {offset});",
            f"static_assert(sizeof({name}::{field}) == {nbytes});",
        ]
    source = tmp_path / "check.cpp"
    source.write_text("\n".join(["#include <stddef.h>", f'#include "{HEADER}"', *lines]))
    compiler = shlex.split(os.environ.get("CXX", "g++"))
    command = [*compiler, "-std=c++17", "-fsyntax-only", source]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# Errors


def test_an_error_says_which_exception_stands_for_it():
    layout = PagedLayout([torch.zeros(4, 6)])
    with OffloadHandler(layout, HostPool(layout, num_pages=1)) as handler:
        with pytest.raises(IndexError):
            handler.store(gpu_block_ids=[4], page_ids=[0])
        assert failure() == ("IndexError", "gpu_block_ids[0] is 4; there are 4 GPU blocks, 0 to 3")
        with pytest.raises(ValueError, match="are both 0"):
            handler.load(page_ids=[0, 0], gpu_block_ids=[0, 0])
        assert failure()[0] == "ValueError"


def test_each_thread_has_an_error_of_its_own():
    layout = PagedLayout([torch.zeros(4, 6)])
    with OffloadHandler(layout, HostPool(layout, num_pages=1)) as handler:
        with pytest.raises(IndexError):
            handler.store(gpu_block_ids=[4], page_ids=[0])
        with ThreadPoolExecutor(1) as pool:
            with pytest.raises(ValueError, match="page_ids has 0"):
                pool.submit(handler.store, gpu_block_ids=[0], page_ids=[]).result()
            assert pool.submit(failure).result()[0] == "ValueError"
        assert failure()[0] == "IndexError"


@simulated
def test_a_driver_call_that_fails_is_named_with_its_code(driver):
    library, memory = loader.library(), torch.zeros(4096, dtype=torch.uint8)
    driver.fail("cuMemHostRegister", code=2)
    assert not library.kvswap_host_register(0, memory.data_ptr(), memory.nbytes)
    assert failure() == (
        "RuntimeError",
        "cuMemHostRegister: CUDA_ERROR_SIMULATED (2): made up by the simulated driver",
    )
    assert not library.kvswap_host_unregister(0, memory.data_ptr())
    assert "cuMemHostUnregister: " in failure()[1]
    assert library.kvswap_host_register(0, memory.data_ptr(), memory.nbytes)
    assert driver.cuda.memory_type(memory) == HOST
    assert library.kvswap_host_unregister(0, memory.data_ptr())
    assert driver.cuda.memory_type(memory) == 0


@pytest.mark.parametrize(
    ("name", "size"), [("kvswap_host_register", (4096,)), ("kvswap_host_unregister", ())]
)
def test_host_memory_cannot_be_registered_for_host_memory(name, size):
    memory = torch.zeros(4096, dtype=torch.uint8)
    assert not getattr(loader.library(), name)(-1, memory.data_ptr(), *size)
    assert failure() == ("RuntimeError", "host memory is registered for a device; -1 is none")


@pytest.mark.gpu
def test_a_device_that_does_not_exist_is_an_error_with_a_reason():
    memory = torch.zeros(4096, dtype=torch.uint8)
    assert not loader.library().kvswap_host_register(97, memory.data_ptr(), memory.nbytes)
    assert "CUDA device 97: CUDA_ERROR_INVALID_DEVICE" in failure()[1]


@without_cuda
def test_a_gpu_whose_context_could_not_be_had_is_asked_again():
    def body(driver):
        from torch_kvswap._native import loader

        memory = torch.zeros(4096, dtype=torch.uint8)
        arguments = 0, memory.data_ptr(), memory.nbytes
        driver.fail("cuDevicePrimaryCtxRetain", code=2)
        print(error_of(lambda: loader.call("kvswap_host_register", *arguments)))
        print(error_of(lambda: loader.call("kvswap_host_register", *arguments)))
        print(driver.calls("cuDevicePrimaryCtxRetain"))

    assert_expected_inline(
        simulated_driver.run(body),
        """\
cuDevicePrimaryCtxRetain for CUDA device 0: CUDA_ERROR_SIMULATED (2): made up by the simulated driver
no error
2
""",
    )


# What it says of the driver


@without_cuda
def test_a_driver_that_lacks_a_function_is_refused_by_name():
    def body(driver):
        from torch_kvswap.cli import doctor

        report = doctor.report()
        print(report["CUDA driver"])
        print(report["scattered copies"])
        print(driver.log(), end="")

    assert_expected_inline(
        simulated_driver.run(body, SIMULATED_WITHOUT="cuStreamIsCapturing"),
        """\
none: the CUDA driver has no cuStreamIsCapturing; install driver 525 or newer
no driver: host memory only
""",
    )


@without_cuda
def test_what_needs_a_driver_says_why_there_is_none():
    def body(driver):
        from torch_kvswap._native import loader

        memory = torch.zeros(4096, dtype=torch.uint8)
        arguments = 0, memory.data_ptr(), memory.nbytes
        print(error_of(lambda: loader.call("kvswap_host_register", *arguments)))

    assert simulated_driver.run(body, SIMULATED_WITHOUT="cuStreamIsCapturing") == (
        "the CUDA driver has no cuStreamIsCapturing; install driver 525 or newer\n"
    )


@without_cuda
@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, "cuMemcpyBatchAsync, 32 fragments a call"),
        ({"KVSWAP_BATCH_LIMIT": "64"}, "cuMemcpyBatchAsync, 64 fragments a call"),
        ({"KVSWAP_BATCH": "0"}, "one call per fragment: KVSWAP_BATCH=0"),
        (
            {"SIMULATED_WITHOUT": "cuMemcpyBatchAsync"},
            "one call per fragment: the driver is older than CUDA 12.8",
        ),
    ],
)
def test_doctor_says_how_scattered_copies_run(environment, expected):
    def body(driver):
        from torch_kvswap.cli import doctor

        print(doctor.report()["scattered copies"])

    assert simulated_driver.run(body, **environment) == f"{expected}\n"


@without_cuda
def test_doctor_says_when_the_kernels_are_too_new_for_the_driver():
    def body(driver):
        from torch_kvswap._native import loader
        from torch_kvswap.cli import doctor

        print(loader.library().kvswap_kernel_version(), doctor.report()["CUDA kernels"])

    version, _, text = simulated_driver.run(body).partition(
        " "
    )  # the simulated driver is of CUDA 12.8
    if int(version) >= 13000:
        assert "too new for the driver, so nothing is staged" in text
    elif int(version):
        assert text == f"built with CUDA 12.{int(version) % 1000 // 10}\n"
    else:
        assert text.startswith("none: built without nvcc")
