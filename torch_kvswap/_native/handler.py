"""The native part of an OffloadHandler, csrc/offload/handler.h."""

from __future__ import annotations

import ctypes
import math
import time
import weakref
from array import array
from collections.abc import Callable, Sequence
from ctypes import byref, c_bool
from functools import partial
from types import MethodType
from typing import TYPE_CHECKING, Any, TypeVar

from torch_kvswap._native import abi, loader
from torch_kvswap._native.arguments import NotCopyable
from torch_kvswap._native.kept import let_go
from torch_kvswap._native.loader import ForkGuard
from torch_kvswap._native.log import log, warn_once
from torch_kvswap._native.submit import resolve_waiting

if TYPE_CHECKING:
    from torch_kvswap._native.submit import Request
    from torch_kvswap.groups import Groups

_T = TypeVar("_T")
_native = loader.library()
_submit, _synchronize = _native.kvswap_handler_submit, _native.kvswap_handler_synchronize
_poll = _native.kvswap_handler_poll
_result_of, _query = _native.kvswap_job_result, _native.kvswap_job_query
_release, _release_gate = _native.kvswap_job_release, _native.kvswap_gate_release
_FIRST_FAILURES = 64  # results of failed jobs that the first call asks for; the next ones double it
_WAIT_SECONDS = 0.1  # longest wait in one native call; Python handles signals between the calls


class JobReference(ctypes.c_void_p):
    """A reference to a native job, released when this object is freed; empty at first."""

    # Of builtins only: in a Python function, a signal handler could raise before the release.
    __del__ = property(partial(MethodType, _release))


class NativeHandler(NotCopyable):
    """Owns the native handler and the memory of the groups. Kept until close() has succeeded.

    Any thread may call any method. In a forked child every method raises RuntimeError, except
    release_gate() and destroy(), which do nothing there.
    """

    def __init__(self, groups: Groups, submit_thread: bool, options: abi.CopyMethodOptions) -> None:
        self.groups = groups
        self.device = groups.device
        self._process = ForkGuard()
        self._pointer: int | None = loader.call(
            "kvswap_handler_create",
            groups.structures,
            len(groups.structures),
            groups.num_layers,
            *self._kind_and_index(),
            submit_thread,
            byref(options),
        )
        self._warn_of_slower_copies()

    def _kind_and_index(self) -> tuple[int, int]:
        """What kvswap_handler_create wants to know of the device."""
        if self.device.type == "cpu":
            return abi.HOST, -1
        return abi.CUDA, self.device.index

    def _warn_of_slower_copies(self) -> None:
        if why := _native.kvswap_handler_slower_copies(self._pointer).decode():
            log.warning("%s (docs/copy_methods.md)", why)
        if self.device.type == "cuda" and not _native.kvswap_driver_has_batch():
            missing, remedy = (
                ("HIP runtime is older than ROCm 7.1 and has no hipMemcpyBatchAsync", "ROCm")
                if _native.kvswap_driver_name() == b"HIP"
                else ("CUDA driver is older than 12.8 and has no cuMemcpyBatchAsync", "the driver")
            )
            warn_once(
                f"the {missing}: copies of scattered blocks take one driver call per fragment; "
                f"update {remedy}"
            )

    @property
    def pointer(self) -> int:
        """The native handler; raises RuntimeError if it was destroyed, or in a forked child."""
        self.check_process()
        if self._pointer is None:
            raise RuntimeError("the handler was destroyed")
        return self._pointer

    def check_open(self) -> None:
        """Raises RuntimeError from the first close() on, and DeviceLostError on a lost device."""
        loader.call("kvswap_handler_check_open", self.pointer)

    def check_process(self) -> None:
        """Raises RuntimeError in a forked child."""
        self._process.check("handler")

    def submit(self, request: Request) -> None:
        """Submits a request: sets id, nbytes and native job in request.numbers.

        The native job is a reference that kvswap_job_release ends.
        """
        # Each Python function that this path calls costs 5 us when it is not in the caches.
        address = request.numbers.buffer_info()[0]
        if not _submit(self._pointer or self.pointer, address):
            self.check_process()
            loader.fail()

    def job(self, native: JobReference) -> abi.JobResult:
        """The state of a job, without asking the device."""
        answer = abi.JobResult()
        if not _result_of(self.pointer, native, byref(answer)):
            loader.fail()
        return answer

    def query(self, native: JobReference) -> bool:
        """Whether a job has ended; asks the device."""
        done: int = _query(self.pointer, native)
        if done < 0:
            loader.fail()
        return done == 1

    def poll(self) -> abi.Ended:
        """Reports jobs that have ended, behind results that it reported before and were not taken.

        One thread at a time may call it and take results, which it counts in `taken`. There may be
        more than abi.POLLED. The results are valid until the next call. The caller must have called
        check_process().
        """
        ended: int | None = _poll(self._pointer or self.pointer)
        if ended is None:
            loader.fail()
        return abi.Ended.from_address(ended)

    def wait_for_ended(self, timeout: float | None) -> None:
        """Waits until a job that was not reported has ended, or all jobs have.

        Args:
            timeout (float | None): seconds; None waits forever.
        """
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        left = _WAIT_SECONDS
        while left > 0:
            left = deadline - time.monotonic()
            seconds = min(max(left, 0.0), _WAIT_SECONDS)
            if loader.call("kvswap_handler_wait_for_ended", self.pointer, seconds):
                return

    def unreported_failures(self, read: Callable[[abi.JobResult], _T]) -> list[_T]:
        """Converts the results of jobs that failed or were cancelled and were not polled yet.

        Args:
            read: converts one result. Must copy what it needs: its argument is only valid in the
                call.
        """
        capacity = _FIRST_FAILURES
        while True:
            answers = (abi.JobResult * capacity)()
            try:
                found = loader.call(
                    "kvswap_handler_unreported_failures", self.pointer, answers, capacity
                )
                results = list(map(read, answers[:found]))
            finally:
                for answer in answers:
                    if answer.job is None:
                        break
                    _release(answer.job)
            if found < capacity:
                return results
            capacity *= 2

    def synchronize(
        self, jobs: Sequence[JobReference] | None, timeout: float | None
    ) -> bool | abi.Unended:
        """Waits until jobs have ended.

        Args:
            jobs: native jobs; None is all.
            timeout (float | None): seconds; None waits forever.

        Returns:
            bool | abi.Unended: whether all of them are done; those that have not ended, if the
                timeout passed first.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        count = 0 if jobs is None else len(jobs)
        # An empty array has no address, which would stand for all jobs.
        pointers = array("Q", [*(job.value or 0 for job in jobs or ()), 0])
        address = None if jobs is None else pointers.buffer_info()[0]
        unended = abi.Unended()
        while True:
            left = _WAIT_SECONDS if deadline is None else deadline - time.monotonic()
            seconds = min(max(left, 0.0), _WAIT_SECONDS)
            ended: int = _synchronize(self.pointer, address, count, seconds, byref(unended))
            if ended < 0:
                loader.fail()
            if ended:
                return ended == 1
            if left <= seconds and deadline is not None:
                return unended

    def wait(self, job: JobReference, layer_group: int, stream: object) -> None:
        """Makes a stream wait for a layer group of a job; group -1 is all of it.

        Returns when the stream was told to wait, which takes as long as submitting a queued job.

        Args:
            job (JobReference): the native job.
            layer_group (int): the group.
            stream: see resolve_waiting().
        """
        waiting = resolve_waiting(stream, self.device)
        loader.call("kvswap_job_wait", self.pointer, job, layer_group, *waiting)

    def cancel(self, job: JobReference) -> bool:
        """Returns whether the job is or will be reported as cancelled."""
        return bool(loader.call("kvswap_job_cancel", self.pointer, job))

    def make_gate(self, layer_groups: int) -> int:
        """Makes a native gate, to be released with release_gate()."""
        gate: int = loader.call("kvswap_gate_create", self.pointer, layer_groups)
        return gate

    def release_gate(self, gate: int) -> None:
        """Releases a gate that is no longer used."""
        if self._process.is_current:
            _release_gate(gate)

    def fill_metrics(self, channel: int, out: Any) -> bool:
        """Writes a channel's metrics to `out`, a pointer to abi.Metrics."""
        return bool(loader.call("kvswap_handler_metrics", self.pointer, channel, out))

    def rebind(self, groups: Groups) -> None:
        """Replaces the groups. Raises RuntimeError, with nothing changed, if a job is running."""
        count, is_done = len(groups.structures), c_bool()
        try:
            loader.call(
                "kvswap_handler_rebind", self.pointer, groups.structures, count, byref(is_done)
            )
        finally:  # Ctrl-C may come behind the call; not here, where nothing is called
            if is_done.value:
                self.groups = groups

    def close(self) -> None:
        """Refuses new jobs and waits for all jobs. Ctrl-C interrupts it."""
        pointer = self.pointer
        while not loader.call("kvswap_handler_close", pointer, _WAIT_SECONDS):
            pass
        let_go(self)

    def destroy(self, owner: weakref.ref[object]) -> None:
        """Finalizer: closes the handler, and frees it unless the process exits.

        If it raises, the handler stays kept.

        Args:
            owner: the OffloadHandler, which is still alive if the process exits.
        """
        if not self._process.is_current:
            return let_go(self)  # a forked child has no copies
        try:
            self.close()
        except RuntimeError as error:
            log.warning(
                "a handler was dropped, not closed, and cannot wait for its jobs: %s; its cache "
                "and host pool stay in memory",
                error,
            )
            return
        if owner() is not None:
            return  # at exit, when other threads may be in a call
        pointer, self._pointer = self._pointer, None
        _native.kvswap_handler_destroy(pointer)
