"""Checked conversions of arguments. Every error names the argument."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import NoReturn, SupportsFloat, SupportsIndex, TypeVar

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]
Name = TypeVar("Name", bound=str)

INT32_MAX = 2**31 - 1
UINT32_MAX = 2**32 - 1
INT64_MIN = -(2**63)
INT64_MAX = 2**63 - 1

# What the `__index__` or `__float__` of an argument raises. Not Exception: a signal handler may
# raise anything in between, such as a TimeoutError, which must arrive as it is.
CONVERSION_ERRORS = ArithmeticError, LookupError, RuntimeError, TypeError, ValueError

_AN = ("A", "E", "I", "O", "a", "e", "i", "o", "ndarray")


def kind_of(value: object) -> str:
    """The type of a wrong argument, for a message: "an int", "a list", "None"."""
    name = type(value).__name__
    if value is None or name == "bytes":
        return "None" if value is None else name
    return f"{'an' if name.startswith(_AN) else 'a'} {name}"


def count_of(count: int, noun: str) -> str:
    """A number of things, for a message: "1 slab", "2 slabs"."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def bytes_text(nbytes: int) -> str:
    """A size, for a message, with GiB where they are easier to read."""
    return f"{nbytes} bytes" + (f" ({nbytes / 2**30:.1f} GiB)" if nbytes >= 2**30 else "")


def read_int(name: str, value: object, least: int = 0, most: int = INT64_MAX) -> int:
    """Converts an integer argument to an int that the native side can hold.

    nanobind refuses wrong types and numbers too, but its TypeError does not name the argument.

    Args:
        name (str): the argument, as the caller wrote it.
        value (object): anything with `__index__`: int, bool, numpy and torch integers.
        least (int): the smallest valid value.
        most (int): the largest valid value.

    Raises:
        TypeError: the value is not an integer.
        ValueError: the value is out of range.
    """
    if type(value) is int and least <= value <= most:  # the common case, fast
        return value
    if not isinstance(value, SupportsIndex):
        raise TypeError(f"{name} is {kind_of(value)}; it must be an integer")
    try:
        number = operator.index(value)
    except CONVERSION_ERRORS as error:  # every tensor has __index__, whatever it holds
        raise TypeError(f"{name} must be an integer: {error}") from error
    if not least <= number <= most:
        valid = f"{least} to {most}" if least < most else f"{least}"
        if most == INT64_MAX and number < least:
            valid = f"{least} or more"
        raise ValueError(f"{name} is {number}; it must be {valid}")
    return number


def one_of(names: Sequence[str]) -> str:
    """What an option can be, for a message: "'raw' or 'lossless'"."""
    *others, last = map(repr, names)
    return f"{', '.join(others)} or {last}"


def read_name(option: str, value: object, names: Sequence[Name]) -> Name:
    """Checks an option that is one of these names.

    Raises:
        ValueError: it is something else.
    """
    for name in names:
        if isinstance(value, str) and value == name:
            return name
    raise ValueError(f"{option} is {value!r}; it must be {one_of(names)}")


def read_switch(name: str, value: object) -> bool:
    """Converts an option that is True or False, also as numpy's bool.

    Raises:
        TypeError: it is something else, such as "no", which Python takes as true.
    """
    if isinstance(value, bool | np.bool_):
        return bool(value)
    raise TypeError(f"{name} is {value!r}; it must be True or False")


def read_timeout(name: str, value: object) -> float | None:
    """Converts a timeout in seconds, 0 or more. None and infinity give None: no timeout.

    Raises:
        TypeError: the value is not a number.
        ValueError: the value is negative or NaN.
    """
    if value is None:
        return None
    if isinstance(value, str | bytes | bytearray) or not isinstance(value, SupportsFloat):
        raise TypeError(f"{name} is {kind_of(value)}; it must be a number of seconds")
    try:
        seconds = float(value)
    except OverflowError:
        seconds = math.inf
    except CONVERSION_ERRORS as error:  # every tensor has __float__, whatever it holds
        raise TypeError(f"{name} must be a number of seconds: {error}") from error
    if not seconds >= 0:
        raise ValueError(f"{name} is {seconds}; it must be 0 seconds or more")
    return None if seconds == math.inf else seconds


class NotCopyable:
    """Base of classes that own native memory or a file, which a copy would free twice.

    `copy.copy`, `copy.deepcopy` and `pickle` raise TypeError. Its message ends with `_instead`,
    which says what to do instead.
    """

    __slots__ = ()
    _instead = "pass it by reference, or make another one"

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} cannot be copied or pickled: it owns memory of this process; "
            f"{self._instead}"
        )
