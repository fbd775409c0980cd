"""What the library logs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch_kvswap._native.log import log


class Handler(logging.Handler):
    """Hands each message to a function."""

    def __init__(self, tell: Callable[[str], object]) -> None:
        super().__init__(logging.WARNING)
        self._tell = tell

    def emit(self, record: logging.LogRecord) -> None:
        self._tell(record.getMessage())


@contextmanager
def logged() -> Iterator[list[str]]:
    """Collects the warnings. On the simulated driver any other warning fails the test."""
    messages: list[str] = []
    before, log.handlers = log.handlers, [Handler(messages.append)]
    try:
        yield messages
    finally:
        log.handlers = before
