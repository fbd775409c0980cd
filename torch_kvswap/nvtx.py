"""Ranges that profilers show, when the environment asks for them with KVSWAP_NVTX=1."""

from __future__ import annotations

import os
import threading
from contextlib import AbstractContextManager, nullcontext

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
        self._ended_first: set[int] = set()
        if self.enabled:
            _check()

    def submit(self, direction: str) -> AbstractContextManager[None]:
        """Around the native call that submits."""
        if not self.enabled:
            return _NOTHING
        return torch.cuda.nvtx.range(f"kvswap submit {direction}")

    def begin(self, job_id: int, direction: str, nbytes: int) -> None:
        """The job was submitted. Once for each job; another thread may have reported it already."""
        if not self.enabled:
            return
        with self._lock:
            if job_id in self._ended_first:
                self._ended_first.remove(job_id)
                return
            name = f"{direction} {job_id}: {nbytes} bytes"
            self._open[job_id] = torch.cuda.nvtx.range_start(name)

    def end(self, job_id: int) -> None:
        """The job is reported. Once for each job."""
        if not self.enabled:
            return
        with self._lock:
            opened = self._open.pop(job_id, None)
            if opened is None:
                self._ended_first.add(job_id)
            else:
                torch.cuda.nvtx.range_end(opened)


def _check() -> None:
    try:
        torch.cuda.nvtx.mark("kvswap handler")  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        raise RuntimeError(
            f"{VARIABLE}=1 asks for NVTX ranges, which torch {torch.__version__} does not have; "
            "unset it, or install a torch with CUDA"
        ) from error
