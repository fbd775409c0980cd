"""Exceptions for failed jobs and failed calls of the native library."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch_kvswap._native.loader import native

if TYPE_CHECKING:
    from torch_kvswap.handler import Result


class TransferError(RuntimeError):
    """Jobs failed or were cancelled. Can be pickled.

    Args:
        message (str): the text of the error.
        results (Sequence[Result]): the results of these jobs.

    Attributes:
        results (list[Result]): the results of these jobs. Empty in the error of a single Result.
    """

    def __init__(self, message: str, results: Sequence[Result] = ()) -> None:
        super().__init__(message)
        self.results = list(results)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.results), self.__dict__


class DeviceLostError(TransferError):
    """The GPU is lost to this process, and with it all jobs that had not ended.

    Calls that need the GPU raise this error without results.
    """


class SourceFailedError(TransferError):
    """The jobs' source was not written, because the job that writes it failed or was cancelled.

    The message of a job names the first such page or GPU block, its place in page_ids or
    gpu_block_ids, and the job that should have written it. A page must be stored again. A block
    must be loaded again, or computed once poll() has reported the load.
    """


class BlocksRejectedError(TransferError):
    """Blocks of a store do not fit into encoded slots, or slots of a load hold no valid block.

    All other blocks of the job are valid.

    Attributes:
        rejected (tuple[int, ...]): Result.rejected, if the error is that of one job; empty for
            several jobs, whose `results` have them.
    """

    def __init__(
        self, message: str, results: Sequence[Result] = (), rejected: Sequence[int] = ()
    ) -> None:
        super().__init__(message, results)
        self.rejected = tuple(rejected)


native.set_python(DeviceLostError=DeviceLostError)
