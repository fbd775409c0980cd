"""Host memory on both sides, where a copy is done when the call returns."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


class CpuStream:
    def synchronize(self) -> None:
        pass


class CpuEvent:
    """A moment: what was to happen before it has happened when it is recorded."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def record(self, stream: object) -> None:
        self.seconds = time.perf_counter()

    def wait(self, stream: object) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end_event: CpuEvent) -> float:
        return (end_event.seconds - self.seconds) * 1e3


class CpuDevice:
    """Host memory on both sides: a transfer has ended when its submission returns."""

    path = "host"
    lost: BaseException | None = None

    def new_stream(self) -> CpuStream:
        return CpuStream()

    def free_stream(self, stream: object) -> None:
        pass

    def new_event(self) -> CpuEvent:
        return CpuEvent()

    def check_not_capturing(self) -> None:
        pass

    def resolve_after(self, after: object) -> tuple[None, None]:
        if after is None or (isinstance(after, tuple) and not after):
            return None, None
        raise TypeError(
            "after= must be None or () for a cache on the CPU, whose transfers run inside the "
            f"call and can wait for no stream; it is {type(after).__name__}: wait for it first"
        )

    def resolve_stream(self, stream: object) -> CpuStream:
        if stream is None or isinstance(stream, torch.cuda.Stream):
            return CpuStream()  # the transfer has ended: there is nothing to wait for
        raise TypeError(f"a torch.cuda.Stream (or None) can wait, {type(stream).__name__} cannot")

    def current(self, stream: Any) -> AbstractContextManager[None]:
        return nullcontext()

    def is_lost_by(self, error: BaseException) -> bool:
        return False
