"""NVTX ranges for profilers, enabled by KVSWAP_NVTX=1."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

VARIABLE = "KVSWAP_NVTX"


class Ranges:
    """The NVTX ranges of a handler.

    One range covers the native part of each submission, and one covers each job from its submission
    until poll() reports it. Nothing is called if it is not enabled. Any thread may call any method.

    Attributes:
        enabled (bool): whether KVSWAP_NVTX is 1.

    Raises:
        ValueError: KVSWAP_NVTX is neither 0 nor 1.
        RuntimeError: NVTX is enabled, but this torch has none.
    """

    def __init__(self) -> None:
        value = os.environ.get(VARIABLE) or "0"
        if value not in ("0", "1"):
            raise ValueError(f"{VARIABLE} is {value!r}; set it to 1 for NVTX ranges, or to 0")
        self.enabled = value == "1"
        self._lock = threading.Lock()
        self._open: dict[int, int] = {}  # range ids by job id
        if self.enabled:
            _check()

    @contextmanager
    def submit(self, direction: str) -> Iterator[None]:
        """A context manager around the native call that submits a job, and around begin().

        No other thread can end a range meanwhile, so no range ends before it has begun.
        """
        with self._lock, torch.cuda.nvtx.range(f"kvswap submit {direction}"):
            yield

    def begin(self, job_id: int, direction: str, nbytes: int) -> None:
        """Opens the range of a submitted job. Called once per job, inside submit()."""
        name = f"{direction} {job_id}: {nbytes} bytes"
        self._open[job_id] = torch.cuda.nvtx.range_start(name)

    def end(self, job_id: int) -> None:
        """Closes the range of a reported job. Called once per job."""
        with self._lock:
            opened = self._open.pop(job_id, None)  # none if Ctrl-C came before begin()
            if opened is not None:
                torch.cuda.nvtx.range_end(opened)


def _check() -> None:
    try:
        torch.cuda.nvtx.mark("kvswap handler")  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        raise RuntimeError(
            f"{VARIABLE}=1 asks for NVTX ranges, which torch {torch.__version__} does not have; "
            "unset it, or install a torch with CUDA"
        ) from error
