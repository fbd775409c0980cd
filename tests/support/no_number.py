"""A value that looks like a number."""

from __future__ import annotations

from typing import NoReturn


class NoNumber:
    """Its conversions raise an error that has nothing to do with types."""

    def __index__(self) -> NoReturn:
        raise KeyError("no number")

    def __float__(self) -> NoReturn:
        raise KeyError("no number")
