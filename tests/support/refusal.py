"""What a call says when it refuses its arguments."""

from __future__ import annotations

import textwrap
from collections.abc import Callable

import pytest


def refusal(call: Callable[..., object], *args: object, **kwargs: object) -> str:
    """Type and message of what the call raises, wrapped; fails when it raises nothing."""
    try:
        call(*args, **kwargs)
    except Exception as error:
        return textwrap.fill(f"{type(error).__name__}: {error}", 88)
    raise AssertionError("the call was accepted")


def message_of(call: Callable[[], object]) -> str:
    """The first line of the RuntimeError that an op raises."""
    with pytest.raises(RuntimeError) as error:
        call()
    return str(error.value).splitlines()[0]
