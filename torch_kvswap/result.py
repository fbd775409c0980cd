"""How a job has ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch_kvswap._native import abi
from torch_kvswap.metrics import PATHS

Direction = Literal["store", "load"]
State = Literal["done", "failed", "cancelled"]

_STATES: dict[int, State] = {
    abi.DONE: "done",
    abi.FAILED: "failed",
    abi.CANCELLED: "cancelled",
}


@dataclass(frozen=True)
class Result:
    """How a job has ended.

    state: "done", "failed" or "cancelled"; what a job wrote that is not done is undefined. nbytes:
    what it was to copy. path: the way of copying, "strided" (copy engine, a driver call for a
    block), "batch" (copy engine, one call for all fragments, or one for each where doctor says so),
    "staged" (kernels pack, the copy engine moves whole pages), "kernel" (it reads and writes host
    pages itself) or "host" (memcpy). submit_seconds: host time in the call that submitted it.
    queue_seconds: how long it waited for its turn to be given to the driver. copy_seconds: the copy
    on the device without the waits before it, for a job that was joined with others that of all of
    them; 0 when it was never copied. error: why it failed; else None.
    """

    job_id: int
    direction: Direction
    state: State
    nbytes: int
    path: str
    submit_seconds: float
    queue_seconds: float
    copy_seconds: float
    error: BaseException | None = field(compare=False)  # made anew for whoever asks

    @property
    def ok(self) -> bool:
        return self.state == "done"


class TransferError(RuntimeError):
    """Jobs that were asked for have failed or were cancelled. results: theirs. Can be pickled."""

    def __init__(self, results: Sequence[Result]) -> None:
        self.results = list(results)
        super().__init__("; ".join(map(_sentence, self.results)))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.results,), self.__dict__  # an exception's own has the text alone


def _sentence(result: Result) -> str:
    name = f"{result.direction} {result.job_id}"
    if result.state == "cancelled":
        return f"{name} was cancelled"
    return f"{name} failed: {result.error}"


def direction_of(channel: int) -> Direction:
    return "store" if channel == abi.STORES else "load"


def result_of(native: abi.JobResult) -> Result | None:
    """None while the job has not ended."""
    if native.state not in _STATES:
        return None
    return Result(
        job_id=native.id,
        direction=direction_of(native.channel),
        state=_STATES[native.state],
        nbytes=native.nbytes,
        path=PATHS[native.path],
        submit_seconds=native.submit_seconds,
        queue_seconds=native.queue_seconds,
        copy_seconds=native.copy_seconds,
        error=None if native.error is None else RuntimeError(native.error.decode()),
    )
