"""The C interface: what it says of the driver, and the streams that it makes."""

import pytest
import stub
import torch
from expecttest import assert_expected_inline

from torch_kvswap import _extension

without_cuda = pytest.mark.skipif(
    torch.version.cuda is not None, reason="the stub would take the place of a real CUDA PyTorch"
)


@pytest.mark.gpu
def test_a_stream_is_of_its_own_and_does_not_wait_for_the_default_stream():
    library = _extension.library()
    handles = [library.kvswap_stream_create(0) for _ in range(40)]
    assert len(set(handles)) == 40
    stream = torch.cuda.ExternalStream(handles[0])
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(1000)
    stream.synchronize()
    assert not torch.cuda.default_stream().query()
    torch.cuda.synchronize()
    assert all(library.kvswap_stream_destroy(0, handle) for handle in handles)


@pytest.mark.gpu
def test_a_device_that_does_not_exist_is_an_error_with_a_reason():
    library = _extension.library()
    assert library.kvswap_stream_create(97) is None
    assert "CUDA device 97: CUDA_ERROR_INVALID_DEVICE" in library.kvswap_last_error().decode()


@without_cuda
def test_a_driver_that_lacks_a_function_is_refused_by_name():
    def body(driver):
        from torch_kvswap.cli import doctor

        report = doctor.report()
        print(report["CUDA driver"])
        print(report["scattered copies"])
        print(driver.log(), end="")

    assert_expected_inline(
        stub.run(body, STUB_WITHOUT="cuStreamIsCapturing"),
        """\
none: the CUDA driver has no cuStreamIsCapturing; install driver 525 or newer
no driver: host memory only
""",
    )


@without_cuda
@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, "cuMemcpyBatchAsync, 8192 fragments a call"),
        ({"KVSWAP_BATCH_LIMIT": "64"}, "cuMemcpyBatchAsync, 64 fragments a call"),
        ({"KVSWAP_BATCH": "0"}, "one call per fragment: KVSWAP_BATCH=0"),
        (
            {"STUB_WITHOUT": "cuMemcpyBatchAsync"},
            "one call per fragment: the driver is older than CUDA 12.8",
        ),
    ],
)
def test_doctor_says_how_scattered_copies_run(environment, expected):
    def body(driver):
        from torch_kvswap.cli import doctor

        print(doctor.report()["scattered copies"])

    assert stub.run(body, **environment) == f"{expected}\n"


@without_cuda
def test_doctor_says_when_the_kernels_are_too_new_for_the_driver():
    def body(driver):
        from torch_kvswap import _extension
        from torch_kvswap.cli import doctor

        print(_extension.library().kvswap_kernel_version(), doctor.report()["CUDA kernels"])

    version, _, text = stub.run(body).partition(" ")  # the stub's driver is of CUDA 12.8
    if int(version) >= 13000:
        assert "too new for the driver: expand_block_ids takes CPU ids only" in text
    elif int(version):
        assert text == f"built with CUDA 12.{int(version) % 1000 // 10}\n"
    else:
        assert text.startswith("none: built without nvcc")
