"""A CUDA driver made of host memory, for the tests of the calls that the library makes of the real one.

Loading it replaces the driver for the whole process, so each test that needs it runs its body with
:func:`run` in a process of its own, on a PyTorch without CUDA.
"""

from __future__ import annotations

import ctypes
import inspect
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import torch

SOURCES = {"libcuda.so.1": "driver.cpp", "libtorch_cuda.so": "torch_cuda.cpp"}
HOST, DEVICE = 1, 2


@cache
def build() -> Path:
    """The folder of the stub's libraries."""
    folder = Path(mkdtemp(prefix="kvswap-stub-"))
    for name, source in SOURCES.items():
        path = Path(__file__).parent / source
        command = ["g++", "-std=c++17", "-shared", "-fPIC", f"-Wl,-soname,{name}", "-o"]
        subprocess.run([*command, str(folder / name), str(path)], check=True)
    return folder


def run(body: Callable[[Driver], None], **environment: str) -> str:
    """Runs `body(driver)` in a new process with the stub in place and returns what it printed."""
    source = textwrap.dedent(inspect.getsource(body))
    program = "\n".join(
        [
            "from stub import DEVICE, HOST, Driver, error_of",
            "driver = Driver()",
            "import torch",
            "from torch_kvswap import ops",
            source,
            f"{body.__name__}(driver)",
        ]
    )
    tests = Path(__file__).parents[1]
    path = os.pathsep.join([str(tests), str(tests.parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": path, "STUB": str(build()), **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def error_of(call: Callable[[], None]) -> str:
    """The message of the RuntimeError that `call` raises, without the numbers that vary."""
    try:
        call()
    except RuntimeError as error:
        message = str(error).splitlines()[0]
        return re.sub(r"process \d+", "process N", re.sub("0x[0-9a-f]+", "0x~", message))
    return "no error"


class Driver:
    """The stub inside the process that :func:`run` starts."""

    def __init__(self) -> None:
        folder = Path(os.environ["STUB"])
        self.library = ctypes.CDLL(str(folder / "libcuda.so.1"), mode=ctypes.RTLD_GLOBAL)
        self.torch_cuda = ctypes.CDLL(str(folder / "libtorch_cuda.so"), mode=ctypes.RTLD_GLOBAL)
        self.library.stub_take_log.restype = ctypes.c_char_p

    def memory(self, num_bytes: int, kind: int, device: int = 0) -> torch.Tensor:
        """Memory that the stub takes for device memory or for pinned host memory."""
        tensor = torch.zeros(num_bytes, dtype=torch.uint8)
        self.adopt(tensor, kind, device)
        return tensor

    def adopt(self, tensor: torch.Tensor, kind: int, device: int = 0) -> None:
        self.library.stub_add(
            ctypes.c_uint64(tensor.data_ptr()), ctypes.c_uint64(tensor.nbytes), kind, device
        )

    def set_stream(self, device: int, stream: int) -> None:
        self.torch_cuda.stub_set_stream(device, ctypes.c_size_t(stream))

    def fail_copy(self, index: int) -> None:
        self.library.stub_fail_copy(index)

    def set_capturing(self, value: bool) -> None:
        self.library.stub_set_capturing(int(value))

    def set_initialized(self, value: bool) -> None:
        self.library.stub_set_initialized(int(value))

    def log(self) -> str:
        return self.library.stub_take_log().decode()
