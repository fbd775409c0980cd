"""Exceptions for jobs that failed, and for calls of the native library that did."""

from __future__ import annotations

import builtins
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch_kvswap.handler import Result


class TransferError(RuntimeError):
    """Jobs have failed or were cancelled. Can be pickled.

    Attributes:
        results (list[Result]): theirs; empty for the error of a single result.
    """

    def __init__(self, message: str, results: Sequence[Result] = ()) -> None:
        super().__init__(message)
        self.results = list(results)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.results), self.__dict__


class DeviceLostError(TransferError):
    """The GPU is lost to this process, with all jobs that had not ended. Calls that need it raise
    this error without results."""


class SourceFailedError(TransferError):
    """What the jobs were to read was not written: the job before them failed or was cancelled."""


def error_type(name: str) -> type[Exception]:
    """The exception that the native library names."""
    if name == DeviceLostError.__name__:
        return DeviceLostError
    found: type[Exception] = getattr(builtins, name)
    return found
