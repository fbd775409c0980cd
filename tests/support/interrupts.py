"""Exceptions at every point of a call at which Python could raise KeyboardInterrupt."""

from __future__ import annotations

import dis
import functools
import re
import signal
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch_kvswap

_PACKAGE = str(Path(torch_kvswap.__file__).parent)


class Interrupted(BaseException):
    """Stands for KeyboardInterrupt, and for what PyThreadState_SetAsyncExc raises."""


class Interrupter:
    """Calls a function and raises Interrupted in the package at one of the points.

    Python looks for signals and asynchronous exceptions when a function begins, behind a call and
    when a loop goes on, and nowhere else. Native code that waits looks for signals only.

    Args:
        in_waits (bool): a call that waits in native code is interrupted there by a signal. What is
            behind it is not reached.

    Attributes:
        points (int): how many points the last call has passed.
    """

    def __init__(self, in_waits: bool = False) -> None:
        self.points = 0
        self._in_waits = in_waits
        self._in_finalizers = False

    def drop(self, at: int, function: Callable[[], Any]) -> bool:
        """Calls a function that drops objects, and raises Interrupted at point number `at` of their
        finalizers. Whether it was reached: what a finalizer raises is lost."""
        lost: list[object] = []
        hook, sys.unraisablehook = sys.unraisablehook, lambda lose: lost.append(lose.exc_type)
        self._in_finalizers = True
        try:
            self.call(at, function)
        finally:
            self._in_finalizers = False
            sys.unraisablehook = hook
        assert lost in ([], [Interrupted])
        return bool(lost)

    def stops(self, at: int, function: Callable[[], Any]) -> bool:
        """Whether the function was interrupted, at point number `at`. See call()."""
        try:
            self.call(at, function)
        except Interrupted:
            return True
        return False

    def call(self, at: int, function: Callable[[], Any]) -> Any:
        """Returns what the function returns, or raises Interrupted at point number `at`.

        `__del__` and the finalizers of weakref are left out: what is raised there is lost.
        """
        self.points = 0
        last: dict[FrameType, int] = {}  # the instruction before, by its offset

        def begin(frame: FrameType, event: str, _: Any) -> Any:
            code = frame.f_code
            if not self._in_finalizers and _is_in_finalizer(frame):
                return None
            traced = _PACKAGE, weakref.__file__ if self._in_finalizers else threading.__file__
            if not code.co_filename.startswith(traced):
                return None
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
            return step

        def step(frame: FrameType, event: str, _: Any) -> Any:
            if event == "opcode":
                before, last[frame] = last.get(frame), frame.f_lasti
                if before is None or before in _followed_by_points(frame.f_code):
                    self.points += 1
                    if self.points == at:
                        raise Interrupted
            return step

        def interrupt(_: int, frame: FrameType | None) -> None:
            if frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
                raise Interrupted

        before = sys.gettrace()
        if self._in_waits and at:
            signal.signal(signal.SIGALRM, interrupt)
            signal.setitimer(signal.ITIMER_REAL, 0.1, 0.1)
        sys.settrace(begin)
        try:
            return function()
        finally:
            sys.settrace(before)
            signal.setitimer(signal.ITIMER_REAL, 0)
            last.clear()  # else it keeps the frames, and they keep it


def _is_in_finalizer(frame: FrameType | None) -> bool:
    while frame is not None:
        code = frame.f_code
        if code.co_name == "__del__" or code.co_filename == weakref.__file__:
            return True
        frame = frame.f_back
    return False


@functools.cache
def _followed_by_points(code: CodeType) -> set[int]:
    """The offsets of these instructions."""
    return {
        instruction.offset
        for instruction in dis.get_instructions(code)
        if instruction.opname in ("RESUME", "JUMP_BACKWARD", "JUMP_ABSOLUTE")
        or re.match("CALL(?!_INTRINSIC)", instruction.opname)
    }
