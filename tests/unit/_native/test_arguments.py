"""Arguments are converted in one place, and errors name the argument."""

import signal

import numpy as np
import pytest
import torch
from no_number import NoNumber

from torch_kvswap._native.arguments import (
    read_int,
    read_timeout,
)
from torch_kvswap._native.ids import read_ids
from torch_kvswap.prefix.hashing import PrefixHasher


@pytest.mark.parametrize("value", [3, np.uint8(3), torch.tensor(3)])
def test_an_integer_of_any_library_is_an_int(value):
    number = read_int("slots", value)
    assert type(number) is int
    assert number == 3


def test_signals_during_a_conversion_arrive_unchanged():
    class Interrupted:
        def __index__(self):
            signal.raise_signal(signal.SIGUSR1)
            return 1

        __float__ = __index__

    def stop(number, frame):
        raise TimeoutError("stop")

    before = signal.signal(signal.SIGUSR1, stop)
    try:
        for read in (
            lambda value: read_int("slots", value),
            lambda value: read_timeout("slots", value),
            lambda value: read_ids("slots", [value]),
            lambda value: PrefixHasher("m", "bfloat16", 1).keys([value]),
        ):
            with pytest.raises(TimeoutError, match=r"^stop$"):
                read(Interrupted())
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("value", [0, 6, -1, 2**64])
def test_an_integer_out_of_range_names_the_range(value):
    with pytest.raises(ValueError, match=rf"^slots is {value}; it must be 1 to 5$"):
        read_int("slots", value, 1, 5)


@pytest.mark.parametrize("value", [torch.tensor([1, 2]), NoNumber()])
def test_an_inconvertible_time_is_refused_by_name(value):
    with pytest.raises(TypeError, match=r"^lease must be a number of seconds: ."):
        read_timeout("lease", value)


@pytest.mark.parametrize(
    ("value", "seconds"),
    [(None, None), (float("inf"), None), (10**400, None), (0, 0.0), (np.float32(0.5), 0.5)],
)
def test_a_timeout_may_be_endless(value, seconds):
    assert read_timeout("timeout", value) == seconds
