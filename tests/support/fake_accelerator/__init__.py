"""An accelerator in host memory, to test what runs on any device that PyTorch has streams for.

It is PyTorch's PrivateUse1 device, named `fakeaccel`, with `torch.Stream`, `torch.Event`, pinned
memory and `torch.accelerator` as on hardware (device.cpp):

- What its streams are given runs late: when the host waits for the device or asks it something. So
  a missing wait shows as old bytes. A stream that a test holds runs nothing.
- Its addresses have no access from the host. Fresh memory is full of 0xCD. Memory is freed in the
  order of the stream on which it was allocated; an operation that uses it after that is an error.
- Copies from and to pinned, contiguous memory of the same dtype, `index_select`, `index_copy_` and
  fills are asynchronous. All other operators block.

Loading it changes what PyTorch says in the whole process, so tests run on it in another one: see
:func:`on_fake_accelerator`.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from native_builds import build_once
from torch.utils import cpp_extension
from workers import Workers

DEVICE_TYPE = "fakeaccel"
SOURCE = Path(__file__).with_name("device.cpp")
LIBRARY = "libfake_accelerator.so"


class Accelerator:
    """The fake accelerator of this process."""

    def __init__(self, library: ctypes.CDLL) -> None:
        for name in ("pending", "take_error"):
            getattr(library, f"accelerator_{name}").restype = ctypes.c_char_p
        library.accelerator_hold.restype = ctypes.c_int64
        self._library = library

    @contextmanager
    def hold(self, stream: torch.Stream, *, until_waited: bool = False) -> Iterator[None]:
        """What the stream is given from now on runs after the block.

        The host may not wait for it in the block, unless until_waited: then that ends the hold.
        """
        number = ctypes.c_int64(stream.stream_id)
        hold = ctypes.c_int64(self._library.accelerator_hold(number, until_waited))
        try:
            yield
        finally:
            self._library.accelerator_release(hold)

    def take_error(self) -> str:
        """What was wrong with an operation, if one was. The test may end with it then."""
        error: str = self._library.accelerator_take_error().decode()
        return error

    # For worker_process.serve().

    def reset(self) -> None:
        self._library.accelerator_finish()
        self.take_error()

    def unexpected_violations(self) -> str:
        self._library.accelerator_finish()
        return self.take_error()

    def describe(self) -> str:
        return f"pending:\n{self._library.accelerator_pending().decode()}"


def load() -> Accelerator:
    """Makes the accelerator the one of this process, for good."""
    library = build()
    torch.utils.rename_privateuse1_backend(DEVICE_TYPE)
    torch.ops.load_library(str(library))
    module = types.ModuleType(f"torch.{DEVICE_TYPE}")
    functions = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "_is_in_bad_fork": lambda: False,
    }
    for name, function in functions.items():
        setattr(module, name, function)
    torch._register_device_module(DEVICE_TYPE, module)
    return Accelerator(ctypes.CDLL(str(library)))


def load_as_rocm() -> Accelerator:
    """Makes the accelerator the "cuda" device of this process, as in a PyTorch for ROCm, for good.

    The library must have been loaded before torch, which asks once whether there is CUDA.
    """
    torch.cuda._lazy_init = lambda: None  # type: ignore[method-assign]
    return Accelerator(ctypes.CDLL(str(build("CUDA"))))


@cache
def build(device_type: str = "PrivateUse1") -> Path:
    """The library, made by the first that asks. device_type: C++'s name of its type for PyTorch."""
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    command = [
        *("g++", "-std=c++20", "-O1", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared"),
        *(f"-DFAKE_TYPE={device_type}", abi),
        *(f"-isystem{path}" for path in cpp_extension.include_paths()),
        *(str(SOURCE), *(f"-L{path}" for path in cpp_extension.library_paths())),
        *("-ltorch_cpu", "-lc10"),
    ]
    settings = f"{command} PyTorch {torch.__version__}"
    name = f"fake-accelerator-{device_type.lower()}"
    return build_once(name, [SOURCE], settings, partial(_compile, command)) / LIBRARY


def _compile(command: list[str], folder: Path) -> None:
    subprocess.run([*command, "-o", str(folder / LIBRARY)], check=True)


def _environment() -> dict[str, str]:
    """Of a process that can import the test support and the package. The library is built before it
    starts, so that its tests do not wait for that."""
    build()
    support, root = Path(__file__).parents[1], Path(__file__).parents[3]
    path = os.pathsep.join([str(support), str(root), os.environ.get("PYTHONPATH", "")])
    more = {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    return {**os.environ, **more}


def _environment_as_rocm() -> dict[str, str]:
    libraries = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so", build("CUDA")
    return {**_environment(), "FAKE_ROCM": "1", "LD_PRELOAD": " ".join(map(str, libraries))}


workers = Workers("fake_accelerator.worker", _environment)
workers_as_rocm = Workers("fake_accelerator.worker", _environment_as_rocm)
needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None,
    reason="the fake accelerator is compiled with g++, which is missing",
)


def on_fake_accelerator(body: Callable[..., None]) -> Callable[..., None]:
    """Decorates a test whose first argument is an :class:`Accelerator`.

    It runs in another process, which loads the test's module from its file. Its other arguments are
    pickled. The test also fails if an operation was wrong and it did not take the error.
    """
    return needs_compiler(workers.runs(body))


def as_rocm(body: Callable[..., None]) -> Callable[..., None]:
    """As :func:`on_fake_accelerator`, where the accelerator is torch's "cuda" and torch.version.hip is
    set, as in a PyTorch for ROCm. Needs a PyTorch without CUDA."""
    without_cuda = pytest.mark.skipif(
        torch.version.cuda is not None or torch.version.hip is not None,
        reason="PyTorch has its own cuda devices",
    )
    return without_cuda(needs_compiler(workers_as_rocm.runs(body)))
