"""The native module: its errors, and what it reports about the driver."""

import hashlib
import os
import re
import socket
from array import array
from contextlib import closing
from pathlib import Path

import pytest
import simulated_driver
import torch
from expecttest import assert_expected_inline
from logged import logged
from processes import in_child, run_script
from simulated_driver import HOST, error_of, simulated, without_cuda

from torch_kvswap._native import loader
from torch_kvswap._native.descriptors import Descriptors
from torch_kvswap._native.loader import native
from torch_kvswap._native.process_lock import is_free, open_lock


@simulated
def test_a_failed_driver_call_is_named(driver):
    memory = torch.zeros(4096, dtype=torch.uint8)
    arguments = 0, memory.data_ptr(), memory.nbytes
    driver.fail("cuMemHostRegister", code=2)
    assert error_of(lambda: native.register_host(*arguments)) == (
        "cuMemHostRegister: CUDA_ERROR_SIMULATED (2): made up by the simulated driver"
    )
    assert "cuMemHostUnregister: " in error_of(lambda: native.unregister_host(*arguments[:2]))
    native.register_host(*arguments)
    assert driver.cuda.memory_type(memory) == HOST
    native.unregister_host(*arguments[:2])
    assert driver.cuda.memory_type(memory) == 0


@pytest.mark.gpu
def test_a_missing_device_is_an_error():
    memory = torch.zeros(4096, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="CUDA device 97: CUDA_ERROR_INVALID_DEVICE"):
        native.register_host(97, memory.data_ptr(), memory.nbytes)


def test_the_import_warns_of_wrong_variables(monkeypatch):
    for name in [*os.environ, "KVSWAP_TEST_X", "KVSWAP_CUDA", "KVSWAP_LATE_CPU", "OTHER_KVSWAP_X"]:
        monkeypatch.setenv(name, "0")
    with logged() as messages:
        loader.load()
    assert messages == []
    monkeypatch.setenv("KVSWAP_HOST_BYTE", "1")
    monkeypatch.setenv("KVSWAP_CHECK_ADRESS", "1")
    monkeypatch.setenv("KVSWAP_LATE_CPU", "2")
    with logged() as messages:
        loader.load()
    assert messages == [
        "the environment has KVSWAP_CHECK_ADRESS, which torch_kvswap does not read; did you mean "
        "KVSWAP_CHECK_ADDRESSES?",
        "the environment has KVSWAP_HOST_BYTE, which torch_kvswap does not read; it reads "
        "KVSWAP_CHECK_ADDRESSES, KVSWAP_LATE_CPU",
        "KVSWAP_LATE_CPU is '2'; it must be 0 or 1",
    ]


def test_each_variable_in_use_is_known(monkeypatch):
    root = loader.FOLDER.parent
    names = ("csrc/environment.cpp", "docs/environment.md", "CONTRIBUTING.md", "Makefile")
    files = [*loader.FOLDER.rglob("*.py"), *(root / name for name in names)]
    for name in re.findall(r"KVSWAP_[A-Z_]+", "".join(file.read_text() for file in files)):
        monkeypatch.setenv(name, "0")
    with logged() as messages:
        loader.load()
    assert messages == []


@without_cuda
def test_a_failed_context_is_asked_for_again():
    def body(driver):
        from torch_kvswap._native.loader import native

        memory = torch.zeros(4096, dtype=torch.uint8)
        arguments = 0, memory.data_ptr(), memory.nbytes
        driver.fail("cuDevicePrimaryCtxRetain", code=2)
        print(error_of(lambda: native.register_host(*arguments)))
        print(error_of(lambda: native.register_host(*arguments)))
        print(driver.calls("cuDevicePrimaryCtxRetain"))

    assert_expected_inline(
        simulated_driver.run(body),
        """\
cuDevicePrimaryCtxRetain for CUDA device 0: CUDA_ERROR_SIMULATED (2): made up by the simulated driver
no error
2
""",
    )


@without_cuda
def test_a_missing_driver_function_is_named():
    def body(driver):
        from torch_kvswap.cli import doctor

        report = doctor.report()
        print(report["CUDA driver"].text)
        print(driver.log(), end="")

    assert_expected_inline(
        simulated_driver.run(body, SIMULATED_WITHOUT="cuStreamIsCapturing"),
        """\
none: the CUDA driver has no cuStreamIsCapturing; install driver 525 or newer
""",
    )


def test_the_stub_must_match_the_library(monkeypatch, tmp_path):
    stub = Path(native.__file__).with_name("_C.pyi")
    assert native.stub() == hashlib.sha256(stub.read_bytes()).hexdigest()
    (tmp_path / "_C.pyi").write_bytes(stub.read_bytes() + b"\n")
    monkeypatch.setattr(loader, "FOLDER", tmp_path)
    with pytest.raises(ImportError, match="and its Python files are of different releases"):
        loader.load()


def test_importing_without_kernels_beside_a_gpu_warns(monkeypatch, tmp_path, caplog):
    monkeypatch.setattr(native, "kernel_version", lambda: 0)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(loader, "_DRIVER", tmp_path)
    loader.load()
    (record,) = caplog.records
    assert record.getMessage().startswith("torch_kvswap was built without CUDA kernels, so the GPU")
    monkeypatch.setattr(loader, "_DRIVER", tmp_path / "none")
    loader.load()
    assert len(caplog.records) == 1


# Descriptors that arrived together are closed together, whatever became of one of them.


def test_one_unclosable_descriptor_leaves_no_other_open() -> None:
    gone, other = (os.memfd_create("test") for _ in range(2))
    fds = array("i", [gone, other]).tobytes()
    came = Descriptors(lambda _: (b"", [(0, 0, fds)]), None)
    assert came.fds == [gone, other]
    os.close(gone)
    came.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(other)
    came.close()
    assert came.fds == []


# The lock that says whether a process and all that were forked from it are gone.


def test_a_forked_child_has_its_own_lock() -> None:
    here, there = socket.socketpair()

    def send() -> int:
        with closing(open_lock()) as lock:
            return socket.send_fds(there, [b"!"], lock.fds)

    with here, there, closing(open_lock()) as own:
        assert in_child(send) == 1
        _, (of_child,), _, _ = socket.recv_fds(here, 1, 1)
        assert (is_free(own.fd), is_free(of_child)) == (False, True)
    os.close(of_child)


@pytest.mark.parametrize(
    ("package", "statement", "said"),
    [
        ("torch", "importlib.reload(torch_kvswap)", "needs PyTorch 2.11 or newer and numpy"),
        ("vllm", "from torch_kvswap.integrations.vllm import KVSwapConnector", "[vllm]'"),
        ("sglang", "import torch_kvswap.integrations.sglang", "[sglang]'"),
        ("transformers", "from torch_kvswap.integrations.transformers import HostCache", "ers]'"),
        ("transformers", "torch_kvswap.integrations.transformers.enable()", "[transformers]'"),
    ],
)
def test_a_missing_package_is_named_with_its_extra(package, statement, said):
    script = f"""
    import importlib, sys, torch_kvswap, torch_kvswap.integrations.transformers
    sys.modules["{package}"] = None
    try:
        {statement}
    except ImportError as error:
        print(error)
    """
    printed = run_script(script)
    assert package in printed
    assert said in printed
