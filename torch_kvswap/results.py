"""The outcome of jobs, and the exceptions of those that failed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch_kvswap._native.loader import native

Direction = Literal["store", "load"]
State = Literal["done", "failed", "cancelled"]


class TransferError(RuntimeError):
    """Jobs failed or were cancelled. Can be pickled.

    Args:
        message (str): the text of the error.
        results (Sequence[Result]): the results of these jobs.

    Attributes:
        results (list[Result]): the results of these jobs. Empty in `Result.error`.
    """

    def __init__(self, message: str, results: Sequence[Result] = ()) -> None:
        super().__init__(message)
        self.results = list(results)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.results), self.__dict__


class DeviceLostError(TransferError):
    """The process has lost its GPU, and with it all jobs that had not ended.

    Calls that need the GPU raise this error, with empty `results`.
    """


class SourceFailedError(TransferError):
    """The source of a job was not written: the job that should write it failed or was cancelled.

    The message of a job names the first such page or GPU block, its place in page_ids or
    gpu_block_ids, and the job that should have written it. Store such a page again. Load such a
    block again, or compute it after poll() has reported its load.
    """


class BlocksRejectedError(TransferError):
    """Blocks of a store do not fit into encoded slots, or slots of a load hold no valid block.

    All other blocks of the job are valid.

    Attributes:
        rejected (tuple[int, ...]): Result.rejected of the job; empty for several jobs, whose
            `results` have them.
    """

    def __init__(
        self, message: str, results: Sequence[Result] = (), rejected: Sequence[int] = ()
    ) -> None:
        super().__init__(message, results)
        self.rejected = tuple(rejected)


class CorruptedPageError(BlocksRejectedError):
    """Loaded blocks do not match what was stored, according to the checksums of their pool.

    The message names the first such GPU block, its page and both checksums. Compute these blocks
    again, and store the pages again. All blocks that are not in `rejected` are valid.
    """


# By number, as csrc/offload/reason.h has them.
_ERRORS = (
    TransferError,
    DeviceLostError,
    SourceFailedError,
    BlocksRejectedError,
    CorruptedPageError,
)


@dataclass(frozen=True)
class Result:
    """The outcome of one job.

    Attributes:
        job_id (int): Job.id.
        direction (str): "store" or "load".
        state (str): "done", "failed" or "cancelled". If it is not "done", the destination is
            undefined; if `rejected` names blocks, only those are.
        nbytes (int): bytes of the blocks.
        link_bytes (int): bytes that crossed the link; fewer than nbytes if the blocks are encoded.
        copy_method (str): "strided" (copy engine, one driver call for each block in layers of one
            allocation), "batch" (copy engine, one driver call for 32 fragments, or one call per
            fragment on older drivers), "staged"
            (kernels pack blocks into whole pages, the copy engine moves the pages), "kernel" (a
            kernel reads and writes host pages directly) or "host" (memcpy). A ReferenceHandler also
            has "generic" (PyTorch's operations pack blocks and copy each run of adjacent pages).
        submit_seconds (float): host time spent in the submitting call.
        queue_seconds (float): time from submission until the driver got the copy.
        copy_seconds (float): time on the device, without the waits before the copy. Jobs that were
            merged into one copy all report the time of that copy. 0 if nothing was copied. nan on a
            device whose events measure no time.
        rejected (tuple[int, ...]): positions of the blocks that were not copied, ascending, in the
            job's list of blocks (all groups one after another). A store rejects blocks that do not
            fit into encoded slots; a load rejects pages without a valid block. Then the job has
            failed, with a BlocksRejectedError, or with a CorruptedPageError if checksums did not
            match, and all other blocks are valid.
        error (TransferError | None): why the job failed: a DeviceLostError, a SourceFailedError, a
            BlocksRejectedError, a CorruptedPageError or a plain TransferError. Ignored in
            comparisons.
        tag: the object passed to store() or load(). Ignored in comparisons; None after unpickling.
    """

    job_id: int
    direction: Direction
    state: State
    nbytes: int
    link_bytes: int
    copy_method: str
    submit_seconds: float
    queue_seconds: float
    copy_seconds: float
    rejected: tuple[int, ...]
    error: TransferError | None = field(compare=False)  # exceptions compare by identity
    tag: Any = field(default=None, compare=False)

    @property
    def ok(self) -> bool:
        """Whether the job is done, that is, neither failed nor cancelled."""
        return self.state == "done"

    def __getstate__(self) -> dict[str, Any]:
        # The tag may be any object, also one that cannot be pickled.
        return {**self.__dict__, "tag": None}


def error_of(results: Sequence[Result]) -> TransferError:
    """One error for several jobs that failed or were cancelled.

    Its type is the common type of the jobs' errors, or TransferError if they differ.
    """
    # A cancelled job has no error.
    kinds = {type(result.error) if result.error else TransferError for result in results}
    kind = kinds.pop() if len(kinds) == 1 else TransferError
    error = kind("; ".join(map(_sentence, results)), results)
    if isinstance(error, BlocksRejectedError) and len(results) == 1:
        error.rejected = results[0].rejected
    error.__cause__ = results[0].error
    return error


def _sentence(result: Result) -> str:
    name = f"{result.direction} {result.job_id}"
    if result.state == "cancelled":
        return f"{name} was cancelled"
    return f"{name} failed: {result.error}"


def _make_error(kind: int, message: str, rejected: tuple[int, ...]) -> TransferError:
    """The error of a job, for its Result, which native code makes."""
    error = _ERRORS[kind](message)
    if isinstance(error, BlocksRejectedError):
        error.rejected = rejected
    return error


native.set_python(DeviceLostError=DeviceLostError, Result=Result, make_error=_make_error)
