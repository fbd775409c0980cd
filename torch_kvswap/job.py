"""A store or a load as its caller sees it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from torch_kvswap._native import abi, loader
from torch_kvswap._native.arguments import INT64_MIN, NotCopyable, read_int
from torch_kvswap.after import resolve_waiting
from torch_kvswap.result import Direction, Result, TransferError, direction_of, result_of

if TYPE_CHECKING:
    from torch_kvswap._native.handler import NativeHandler
    from torch_kvswap.handler import OffloadHandler

_release = loader.library().kvswap_job_release  # __del__ may run when modules are gone


class Job(NotCopyable):
    """A store or a load, from its submission on. Any thread may call it. Keeps its handler.

    id: its number within the handler.
    """

    __slots__ = ("__weakref__", "handler", "id", "native")

    def __init__(self, handler: OffloadHandler, native: int, number: int) -> None:
        self.handler = handler
        self.id = number
        self.native = native

    def __del__(self) -> None:
        if hasattr(self, "native"):  # else __init__ was not reached
            _release(self.native)

    @property
    def direction(self) -> Direction:
        """ "store" or "load"."""
        return direction_of(self._ask().channel)

    @property
    def nbytes(self) -> int:
        """What it copies."""
        return int(self._ask().nbytes)

    @property
    def result(self) -> Result | None:
        """How it ended; None while it runs, and until done(), wait() or finished() has looked."""
        return result_of(self._ask())

    def done(self) -> bool:
        """Whether it has ended, well or not. Waits for nothing."""
        return bool(self.handler.native.is_done(self.native))

    def wait_on(self, stream: torch.cuda.Stream | None = None) -> None:
        """Makes work given to the stream from now on wait for the job; the host goes on.

        A job that is still queued is first given to the driver, with all that is queued ahead of
        it; the host waits for that, but for nothing on the GPU.

        Args:
            stream (torch.cuda.Stream | None): a stream of any GPU; None is the current stream of
                the cache's GPU.

        Raises:
            TransferError: the job has failed or was cancelled. What fails later, finished() and
                wait() tell.
            RuntimeError: the stream is capturing a CUDA graph, which could not hold the wait.
                Raised whether or not the job has ended.
        """
        self._wait_on(-1, stream)

    def wait_layer(self, layer: int, stream: torch.cuda.Stream | None = None) -> None:
        """wait_on() for the group of layers that has this layer, and those before it.

        layer: the position of its tensor in the layout, or in all layouts one after the other.
        Raises IndexError for a layer that there is not.
        """
        layers = self.handler.native.groups.num_layers
        layer = read_int("layer", layer, INT64_MIN)
        if not 0 <= layer < layers:
            raise IndexError(f"layer {layer} of a cache with layers 0 to {layers - 1}")
        self._wait_on(layer * self._ask().layer_groups // layers, stream)

    def _wait_on(self, layer_group: int, stream: torch.cuda.Stream | None) -> None:
        self.handler.native.wait_on(self.native, layer_group, *resolve_waiting(stream))
        result = self.result
        if result is not None and not result.ok:
            raise TransferError([result]) from result.error

    def _ask(self) -> abi.JobResult:
        return self.handler.native.job(self.native)


def wait_for(native: NativeHandler, jobs: list[Job] | None, timeout: float | None) -> None:
    """`OffloadHandler.wait` for jobs of that handler; None is for all that were not reported."""
    well = native.wait(jobs, timeout)
    if well is None:
        running = [job for job in jobs or () if not job.done()]
        names = ": " + ", ".join(f"{job.direction} {job.id}" for job in running)
        raise TimeoutError(f"after {timeout:g} s some jobs still run{names if running else ''}")
    if well:
        return
    if jobs is None:
        failed = native.unreported_failures()
    else:
        results = [job.result for job in jobs]
        failed = [result for result in results if result and not result.ok]
    if failed:  # else another thread has been told
        raise TransferError(failed) from failed[0].error
