"""The native part of a handler, csrc/offload/handler.h, and who may call it."""

from __future__ import annotations

import ctypes
import time
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from torch_kvswap._native import abi, loader
from torch_kvswap._native.arguments import NotCopyable
from torch_kvswap._native.loader import ForkGuard
from torch_kvswap._native.log import log, warn_once

if TYPE_CHECKING:
    from torch_kvswap._native.submit import Request
    from torch_kvswap.groups import Groups

_T = TypeVar("_T")
_native = loader.library()
_submit, _synchronize = _native.kvswap_handler_submit, _native.kvswap_handler_synchronize
_result_of, _query = _native.kvswap_job_result, _native.kvswap_job_query
_release, _release_gate = _native.kvswap_job_release, _native.kvswap_gate_release
_AT_FIRST, _AT_ONCE = 4, 64  # results asked for in one call: memory for many costs microseconds
_PATIENCE = 0.1  # seconds in one call: Python handles signals in between


class NativeHandler(NotCopyable):
    """Owns it and the memory of the groups. Every method raises RuntimeError in a forked child."""

    def __init__(self, groups: Groups, submit_thread: bool, options: abi.CopyMethodOptions) -> None:
        self.groups = groups
        self.device = groups.device
        self._process = ForkGuard()
        self._is_closed = False
        self._pointer: int | None = loader.call(
            "kvswap_handler_create",
            groups.structures,
            len(groups.structures),
            groups.num_layers,
            -1 if groups.device.type == "cpu" else groups.device.index,
            submit_thread,
            ctypes.byref(options),
        )
        self._warn_of_slower_copies()

    def _warn_of_slower_copies(self) -> None:
        if problem := _native.kvswap_handler_missing_methods(self._pointer).decode():
            log.warning(
                "kernels would make some transfers faster, but cannot be had: %s; the copy engines "
                "do all of them (docs/copy_methods.md)",
                problem,
            )
        if self.device.type == "cuda" and not _native.kvswap_driver_has_batch():
            warn_once(
                "the CUDA driver is older than 12.8 and has no cuMemcpyBatchAsync: copies of "
                "scattered blocks take a call of the driver for each fragment; update the driver"
            )

    @property
    def pointer(self) -> int:
        self._process.check("handler")
        if self._pointer is None:
            raise RuntimeError("the handler is gone")
        return self._pointer

    def check_open(self) -> None:
        """Raises RuntimeError from the first close() on, also when that was interrupted."""
        if self._is_closed:
            raise RuntimeError("the handler is closed; make a new one")

    def check_process(self) -> None:
        self._process.check("handler")

    def submit(self, request: Request) -> int:
        """A native job. Writes its number and its bytes to request.native."""
        native = request.native
        job: int | None = _submit(self.pointer, ctypes.byref(native))
        if job is None:
            loader.fail()
        return job

    def job(self, native: int) -> abi.JobResult:
        """What has become of a job; does not ask the device."""
        answer = abi.JobResult()
        if not _result_of(self.pointer, native, ctypes.byref(answer)):
            loader.fail()
        return answer

    def query(self, native: int) -> bool:
        """Whether a job has ended; asks the device."""
        done: int = _query(self.pointer, native)
        if done < 0:
            loader.fail()
        return done == 1

    def poll(self, read: Callable[[abi.JobResult], _T]) -> list[_T]:
        """What `read` makes of each job that has ended since the last call. It reads all it needs:
        nothing of its argument is valid afterwards."""
        results: list[_T] = []
        capacity = _AT_FIRST
        while True:
            found = self._results("kvswap_handler_poll", capacity, read)
            results += found
            if len(found) < capacity:
                return results
            capacity = _AT_ONCE

    def unreported_failures(self, read: Callable[[abi.JobResult], _T]) -> list[_T]:
        """What `read` makes of each job that has failed and was not reported yet."""
        capacity = _AT_ONCE
        while True:
            found = self._results("kvswap_handler_unreported_failures", capacity, read)
            if len(found) < capacity:
                return found
            capacity *= 2

    def synchronize(self, jobs: Sequence[int] | None, timeout: float | None) -> bool | None:
        """Whether the jobs, None for all, have ended well; None when they have not in time."""
        deadline = None if timeout is None else time.monotonic() + timeout
        count = 0 if jobs is None else len(jobs)
        array = ctypes.c_void_p * count
        pointers = None if jobs is None else array(*jobs)
        while True:
            left = _PATIENCE if deadline is None else deadline - time.monotonic()
            seconds = min(max(left, 0.0), _PATIENCE)
            ended: int = _synchronize(self.pointer, pointers, count, seconds)
            if ended < 0:
                loader.fail()
            if ended:
                return ended == 1
            if left <= seconds and deadline is not None:
                return None

    def wait(self, job: int, layer_group: int, stream: int | None, device: int) -> None:
        """stream, device: as `resolve_waiting` gives them."""
        loader.call("kvswap_job_wait", self.pointer, job, layer_group, stream, device)

    def cancel(self, job: int) -> bool:
        return bool(loader.call("kvswap_job_cancel", self.pointer, job))

    def make_gate(self, parts: int) -> int:
        gate: int = loader.call("kvswap_gate_create", self.pointer, parts)
        return gate

    def release_gate(self, gate: int) -> None:
        """Nobody has the gate any more. Does nothing in a fork, which has none."""
        if self._process.is_current:
            _release_gate(gate)

    def fill_metrics(self, channel: int, out: Any) -> bool:
        """out: a pointer to abi.Metrics."""
        return bool(loader.call("kvswap_handler_metrics", self.pointer, channel, out))

    def rebind(self, groups: Groups) -> None:
        count = len(groups.structures)
        loader.call("kvswap_handler_rebind", self.pointer, groups.structures, count)
        self.groups = groups

    def close(self) -> None:
        pointer = self.pointer
        self._is_closed = True
        while not loader.call("kvswap_handler_close", pointer, _PATIENCE):
            pass

    def destroy(self, owner: weakref.ref[object]) -> None:
        """The handler was dropped, or the process exits. A fork has nothing of it."""
        if not self._process.is_current or self._pointer is None:
            return
        try:
            self.close()
        except RuntimeError as error:
            _kept.append(self)  # memory that a copy may still use
            log.warning(
                "a handler was dropped, not closed, and cannot wait for its jobs: %s; its cache "
                "and host pool stay in memory",
                error,
            )
            return
        if owner() is not None:
            return  # the process exits, and other threads may be in a call
        pointer, self._pointer = self._pointer, None
        _native.kvswap_handler_destroy(pointer)

    def _results(
        self, function: str, capacity: int, read: Callable[[abi.JobResult], _T]
    ) -> list[_T]:
        answers = (abi.JobResult * capacity)()
        results = []
        for answer in answers[: loader.call(function, self.pointer, answers, capacity)]:
            results.append(read(answer))
            _release(answer.job)
        return results


_kept: list[NativeHandler] = []
