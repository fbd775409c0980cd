"""Lets a test decide when a pool's next chunk is pinned."""

from __future__ import annotations

import threading
from typing import Any

from patience import PATIENCE

from torch_kvswap.host_pool.pinning import Pinning


class PinningSteps:
    """Holds the thread that pins the next pool after each chunk, until `pin_more`.

    Attributes:
        seen (list[int]): how many pages were ready after each step, from 0 on.
    """

    def __init__(self) -> None:
        self._turns = threading.Semaphore(0)
        self.seen: list[int] = []
        publish = Pinning._publish

        def step(pinning: Pinning, end_page: int, *chunk_blocks: int) -> None:
            publish(pinning, end_page, *chunk_blocks)
            self.seen.append(end_page)
            if threading.current_thread() is not threading.main_thread():
                assert self._turns.acquire(timeout=PATIENCE)

        def first_step(pinning: Pinning, *pages: int) -> None:
            Pinning._publish = publish  # type: ignore[method-assign]
            of_this_pool: Any = pinning
            of_this_pool._publish = lambda *pages: step(pinning, *pages)
            step(pinning, *pages)

        Pinning._publish = first_step  # type: ignore[method-assign,assignment]

    def pin_more(self, chunks: int = 1) -> None:
        self._turns.release(chunks)
