"""The text of the error that a call raises."""

from __future__ import annotations

import textwrap
from collections.abc import Callable

import pytest


def error_text(call: Callable[..., object], *args: object, **kwargs: object) -> str:
    """The type and message of the exception that the call raises, wrapped at 88 characters."""
    try:
        call(*args, **kwargs)
    except Exception as error:
        return textwrap.fill(f"{type(error).__name__}: {error}", 88)
    raise AssertionError("the call raised nothing")


def one_line(call: Callable[..., object], *args: object, **kwargs: object) -> str:
    """The same in one line."""
    return " ".join(error_text(call, *args, **kwargs).split())


def message_of(call: Callable[[], object]) -> str:
    """The first line of the RuntimeError that an op raises."""
    with pytest.raises(RuntimeError) as error:
        call()
    return str(error.value).splitlines()[0]
