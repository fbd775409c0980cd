"""The native part of a handler, csrc/offload/handler.h, and who may call it."""

from __future__ import annotations

import ctypes
import time
import warnings
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch_kvswap._native import abi, loader
from torch_kvswap._native.arguments import NotCopyable
from torch_kvswap._native.fork_guard import Process
from torch_kvswap.groups import Groups
from torch_kvswap.metrics import Metrics, read_metrics
from torch_kvswap.result import Result, result_of

if TYPE_CHECKING:
    from torch_kvswap._native.submit import Request
    from torch_kvswap.job import Job

_native = loader.library()
_submit, _wait = _native.kvswap_handler_submit, _native.kvswap_handler_wait
_result_of, _is_done = _native.kvswap_job_result, _native.kvswap_job_done
_release, _release_gate = _native.kvswap_job_release, _native.kvswap_gate_release
_AT_FIRST, _AT_ONCE = 4, 64  # results asked for in one call: memory for many costs microseconds
_PATIENCE = 0.1  # seconds in one call: Python handles signals in between


class NativeHandler(NotCopyable):
    """Owns it and the memory of the groups. Every method raises RuntimeError in a forked child."""

    def __init__(self, groups: Groups, threaded: bool, options: abi.PathOptions) -> None:
        self.groups = groups
        self.device = groups.device
        self._process = Process()
        self._pointer: int | None = abi.call(
            "kvswap_handler_create",
            groups.structures,
            len(groups.structures),
            groups.num_layers,
            -1 if groups.device.type == "cpu" else groups.device.index,
            threaded,
            ctypes.byref(options),
        )
        try:
            self._warn_of_missing_kernels()
        except BaseException:  # the caller has turned warnings into errors
            self.close()
            _native.kvswap_handler_destroy(self._pointer)
            raise

    def _warn_of_missing_kernels(self) -> None:
        problem = _native.kvswap_handler_path_problem(self._pointer).decode()
        if problem:
            warnings.warn(
                f"kernels would make some transfers faster, but cannot be had: {problem}; the copy "
                "engines do all of them (docs/paths.md)",
                RuntimeWarning,
                stacklevel=4,
            )

    @property
    def pointer(self) -> int:
        self._process.check("handler")
        if self._pointer is None:
            raise RuntimeError("the handler is gone")
        return self._pointer

    def check_process(self) -> None:
        self._process.check("handler")

    def submit(self, request: Request) -> tuple[int, int]:
        """A native job, and its number."""
        native = request.native
        job: int | None = _submit(self.pointer, ctypes.byref(native))
        if job is None:
            abi.fail()
        return job, native.id

    def job(self, native: int) -> abi.JobResult:
        """What has become of a job; does not ask the device."""
        answer = abi.JobResult()
        if not _result_of(self.pointer, native, ctypes.byref(answer)):
            abi.fail()
        return answer

    def is_done(self, native: int) -> bool:
        """Whether a job has ended; asks the device."""
        done: int = _is_done(self.pointer, native)
        if done < 0:
            abi.fail()
        return done == 1

    def finished(self) -> list[Result]:
        results: list[Result] = []
        capacity = _AT_FIRST
        while True:
            found = self._results("kvswap_handler_finished", capacity)
            results += found
            if len(found) < capacity:
                return results
            capacity = _AT_ONCE

    def unreported_failures(self) -> list[Result]:
        capacity = _AT_ONCE
        while True:
            found = self._results("kvswap_handler_unreported_failures", capacity)
            if len(found) < capacity:
                return found
            capacity *= 2

    def wait(self, jobs: Sequence[Job] | None, timeout: float | None) -> bool | None:
        """Whether the jobs, None for all, have ended well; None when they have not in time."""
        deadline = None if timeout is None else time.monotonic() + timeout
        count = 0 if jobs is None else len(jobs)
        array = ctypes.c_void_p * count
        pointers = None if jobs is None else array(*[job.native for job in jobs])
        while True:
            left = _PATIENCE if deadline is None else deadline - time.monotonic()
            seconds = min(max(left, 0.0), _PATIENCE)
            ended: int = _wait(self.pointer, pointers, count, seconds)
            if ended < 0:
                abi.fail()
            if ended:
                return ended == 1
            if left <= seconds and deadline is not None:
                return None

    def wait_on(self, job: int, layer_group: int, stream: int | None, device: int) -> None:
        """stream, device: as `resolve_waiting` gives them."""
        abi.call("kvswap_job_wait_on", self.pointer, job, layer_group, stream, device)

    def cancel(self, job: Job) -> bool:
        return bool(abi.call("kvswap_job_cancel", self.pointer, job.native))

    def make_gate(self, parts: int) -> int:
        gate: int = abi.call("kvswap_gate_create", self.pointer, parts)
        return gate

    def release_gate(self, gate: int) -> None:
        """Nobody has the gate any more. Does nothing in a fork, which has none."""
        if self._process.is_current:
            _release_gate(gate)

    def metrics(self) -> Metrics:
        pointer = self.pointer
        return read_metrics(
            lambda channel, out: bool(abi.call("kvswap_handler_metrics", pointer, channel, out))
        )

    def rebind(self, groups: Groups) -> None:
        count = len(groups.structures)
        abi.call("kvswap_handler_rebind", self.pointer, groups.structures, count)
        self.groups = groups

    def close(self) -> None:
        while not abi.call("kvswap_handler_close", self.pointer, _PATIENCE):
            pass

    def destroy(self, owner: weakref.ref[object]) -> None:
        """The handler was dropped, or the process exits. A fork has nothing of it."""
        if not self._process.is_current or self._pointer is None:
            return
        try:
            self.close()
        except RuntimeError as error:
            _kept.append(self)  # memory that a copy may still use
            warnings.warn(
                f"a handler was dropped, not closed, and cannot wait for its jobs: {error}; its "
                "cache and host pool stay in memory",
                RuntimeWarning,
                stacklevel=2,
            )
            return
        if owner() is not None:
            return  # the process exits, and other threads may be in a call
        pointer, self._pointer = self._pointer, None
        _native.kvswap_handler_destroy(pointer)

    def _results(self, function: str, capacity: int) -> list[Result]:
        answers = (abi.JobResult * capacity)()
        results = []
        for answer in answers[: abi.call(function, self.pointer, answers, capacity)]:
            result = result_of(answer)
            _release(answer.job)
            if result is not None:
                results.append(result)
        return results


_kept: list[NativeHandler] = []
