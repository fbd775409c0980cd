"""Ranges that profilers show, when the environment asks for them with KVSWAP_NVTX=1."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

VARIABLE = "KVSWAP_NVTX"
_NOTHING: AbstractContextManager[None] = nullcontext()


class Ranges:
    """The ranges of a handler: one around the native part of each submission, and one for each job
    from its submission until it is reported. Off, every method does nothing.

    Reads KVSWAP_NVTX when it is made: ValueError for what is neither 0 nor 1, RuntimeError when
    this torch has no NVTX. Any thread may call the methods. Keeps the jobs that are not reported.
    """

    def __init__(self) -> None:
        asked = os.environ.get(VARIABLE) or "0"
        if asked not in ("0", "1"):
            raise ValueError(f"{VARIABLE} is {asked!r}; set it to 1 for NVTX ranges, or to 0")
        self.enabled = asked == "1"
        self._lock = threading.Lock()
        self._open: dict[int, int] = {}  # the ranges of jobs, by job id
        if self.enabled:
            _check()

    def submit(self, direction: str) -> AbstractContextManager[None]:
        """Around the native call that submits, and begin(). No other thread can end a range
        meanwhile: none ends before it has begun."""
        return self._submit(direction) if self.enabled else _NOTHING

    @contextmanager
    def _submit(self, direction: str) -> Iterator[None]:
        with self._lock, torch.cuda.nvtx.range(f"kvswap submit {direction}"):
            yield

    def begin(self, job_id: int, direction: str, nbytes: int) -> None:
        """The job was submitted. Once for each job, inside submit()."""
        if self.enabled:
            name = f"{direction} {job_id}: {nbytes} bytes"
            self._open[job_id] = torch.cuda.nvtx.range_start(name)

    def end(self, job_id: int) -> None:
        """The job is reported. Once for each job."""
        if not self.enabled:
            return
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
