"""The decorators of tests that run on the fake accelerator."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from workers import Workers

from fake_accelerator.library import build

needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None,
    reason="the fake accelerator is compiled with g++, which is missing",
)


def environment() -> dict[str, str]:
    """Of a process that can import the test support and the package. The library is built before it
    starts, so that its tests do not wait for that."""
    build()
    support, root = Path(__file__).parents[1], Path(__file__).parents[3]
    path = os.pathsep.join([str(support), str(root), os.environ.get("PYTHONPATH", "")])
    # Each stream is a thread that computes with PyTorch's operators for the CPU.
    more = {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    return {**os.environ, **more}


workers = Workers("fake_accelerator.worker", environment)


def _environment_as_rocm() -> dict[str, str]:
    libraries = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so", build("CUDA")
    return {**environment(), "FAKE_ROCM": "1", "LD_PRELOAD": " ".join(map(str, libraries))}


workers_as_rocm = Workers("fake_accelerator.worker", _environment_as_rocm)


def on_fake_accelerator(body: Callable[..., None]) -> Callable[..., None]:
    """Decorates a test whose first argument is an :class:`Accelerator`, in its first state.

    It runs in another process, which loads the test's module from its file. Its other arguments are
    pickled. The test also fails if the accelerator was lost and no test wanted that: see
    :meth:`Accelerator.take_error`.
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
