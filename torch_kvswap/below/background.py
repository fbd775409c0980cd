"""Threads that work for a store beside a scheduler."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable


def background_thread(run: Callable[[], None], name: str) -> threading.Thread:
    """A daemon thread, not yet started, that takes no core from the thread that wakes it."""

    def begin() -> None:
        with contextlib.suppress(OSError):  # a sandbox may forbid it: then it only disturbs more
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))  # 0: this thread
        run()

    return threading.Thread(target=begin, name=name, daemon=True)
