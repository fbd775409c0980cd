"""Exceptions at every point of a call at which Python could raise KeyboardInterrupt."""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch_kvswap

_PACKAGE = str(Path(torch_kvswap.__file__).parent)


class Interrupted(BaseException):
    """Stands for KeyboardInterrupt, and for what PyThreadState_SetAsyncExc raises."""


class Interrupter:
    """Calls a function and raises Interrupted in the package at one of the points.

    Python looks for signals and asynchronous exceptions when a function begins, behind a call and
    when a loop goes on, and nowhere else. Finalizers are left out: what is raised there is lost.

    Attributes:
        points (int): how many points the last call has passed.
    """

    def __init__(self) -> None:
        self.points = 0

    def call(self, at: int, function: Callable[[], Any]) -> Any:
        """Returns what the function returns, or raises Interrupted at point number `at`."""
        self.points = 0
        last: dict[FrameType, str] = {}

        def begin(frame: FrameType, event: str, _: Any) -> Any:
            code = frame.f_code
            if not code.co_filename.startswith(_PACKAGE) or code.co_name == "__del__":
                return None
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
            return step

        def step(frame: FrameType, event: str, _: Any) -> Any:
            if event == "opcode":
                before = last.get(frame)
                last[frame] = dis.opname[frame.f_code.co_code[frame.f_lasti]]
                if before is None or _is_followed_by_a_point(before):
                    self.points += 1
                    if self.points == at:
                        raise Interrupted
            return step

        before = sys.gettrace()
        sys.settrace(begin)
        try:
            return function()
        finally:
            sys.settrace(before)
            last.clear()  # else it keeps the frames, and they keep it


def _is_followed_by_a_point(operation: str) -> bool:
    if operation in ("RESUME", "JUMP_BACKWARD", "JUMP_ABSOLUTE"):
        return True
    return operation.startswith("CALL") and not operation.startswith("CALL_INTRINSIC")
