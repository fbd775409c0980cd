"""The process that made an object: a fork has its memory, but neither its CUDA nor its threads."""

from __future__ import annotations

import os


class Process:
    """The calling process, remembered."""

    def __init__(self) -> None:
        self.pid = os.getpid()

    @property
    def is_current(self) -> bool:
        return os.getpid() == self.pid

    def check(self, noun: str) -> None:
        """Raises RuntimeError in a process that was forked from the remembered one."""
        if os.getpid() != self.pid:
            raise RuntimeError(
                f"this {noun} is of process {self.pid} and cannot be used in process "
                f"{os.getpid()}, forked from it; make a {noun} in each process"
            )
