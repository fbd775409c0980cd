"""Block ids are accepted in every common form, and copied during the call."""

from __future__ import annotations

import signal
from array import array
from typing import NoReturn

import numpy as np
import pytest
import torch
from error_text import error_text
from expecttest import assert_expected_inline
from processes import run_script

from torch_kvswap._native.arguments import read_int, read_timeout
from torch_kvswap._native.ids import read_ids as read_checked_ids
from torch_kvswap._native.loader import native
from torch_kvswap.prefix.hashing import PrefixHasher


def read_ids(name: str, ids: object) -> array[int]:
    read: array[int] = native.read_ids(name, ids)[0]
    return read


class NoNumber:
    """Its conversions raise an error that has nothing to do with types."""

    def __index__(self) -> NoReturn:
        raise KeyError("no number")

    __float__ = __index__


@pytest.mark.parametrize(
    "ids",
    [
        [4, 0],
        (4, 0),
        range(4, -1, -4),
        array("q", [4, 0]),
        array("B", [4, 0]),
        np.array([4, 0], np.uint8),
        np.array([4, 0], np.uint64),
        np.array([4, 9, 0])[::2],
        np.array([0, 4])[::-1],
        np.frombuffer(np.array([4, 0]).tobytes(), np.int64),  # read-only
        [np.int32(4), np.int64(0)],
        torch.tensor([4, 0]),
        torch.tensor([4, 0], dtype=torch.uint8),
        torch.tensor([[4, 9], [0, 9]], dtype=torch.int32)[:, 0],
    ],
    ids=repr,
)
def test_ids_may_be_of_any_integer_kind(ids: object) -> None:
    read = read_ids("page_ids", ids)
    assert (read.typecode, read.tolist()) == ("q", [4, 0])


def of_int64(ids: list[int]) -> array[int]:
    return array("q", ids)


@pytest.mark.parametrize("make", [list, of_int64, np.array, torch.tensor])
def test_ids_may_change_after_they_were_read(make: type) -> None:
    ids = make([4, 0])
    read = read_ids("page_ids", ids)
    ids[0] = 3
    assert read.tolist() == [4, 0]


def test_there_may_be_no_ids() -> None:
    for none in ([], (), np.zeros(0, np.int64), torch.empty(0, dtype=torch.int32)):
        read, least, largest = native.read_ids("page_ids", none)
        assert (read.tolist(), least, largest) == ([], 0, -1)


@pytest.mark.parametrize("ids", [[4, 7, -1, 9], [-3], np.array([5, 5])])
def test_the_least_and_the_largest_id_are_told(ids: list[int]) -> None:
    assert native.read_ids("page_ids", ids)[1:] == (min(ids), max(ids))


def test_the_largest_int64_is_an_id_like_others() -> None:
    largest = [2**63 - 1, -(2**63)]
    assert read_ids("page_ids", largest).tolist() == largest


def test_what_are_no_ids_is_refused() -> None:
    calls = [
        [0.0],
        torch.tensor([True]),
        torch.zeros(1, dtype=torch.bfloat16),
        ["1"],
        [[0, 1]],
        torch.tensor(3),
        {0, 1},
        b"01",
        [2**63, 1],
        [1, 2**64],
        np.array([1, 2**64 - 1], np.uint64),
        [1, None],
        [np.True_],
        [1, NoNumber()],
    ]
    assert_expected_inline(
        "\n".join(error_text(read_ids, "page_ids", ids) for ids in calls),
        """\
TypeError: page_ids[0] is a float; it must be an integer
TypeError: page_ids is of torch.bool; ids must be integers
TypeError: page_ids is of torch.bfloat16; ids must be integers
TypeError: page_ids[0] is a str; it must be an integer
ValueError: page_ids[0] is a list; the ids must have one dimension
ValueError: page_ids has shape []; it must have one dimension
TypeError: page_ids is a set; pass a list, numpy array or CPU tensor
TypeError: page_ids is bytes; pass a list, numpy array or CPU tensor
IndexError: page_ids[0] is 9223372036854775808; no block has such a number
IndexError: page_ids[1] is 18446744073709551616; no block has such a number
IndexError: page_ids[1] is 18446744073709551615; no block has such a number
TypeError: page_ids[1] is None; it must be an integer
TypeError: page_ids[0] is a bool; it must be an integer
TypeError: page_ids[1] must be an integer: 'no number'""",
    )


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_tensors_unreadable_to_numpy_are_refused() -> None:
    for ids in (
        torch.quantize_per_tensor(torch.zeros(1), 1, 0, torch.qint32),
        torch.zeros(1, dtype=torch.uint8).view(torch.bits8),
        torch.tensor([1]).to_sparse(),
    ):
        with pytest.raises(TypeError, match=rf"^page_ids is of {ids.dtype} and cannot be read: ."):
            read_ids("page_ids", ids)


@pytest.mark.parametrize("count", [1, 1021, 1022, 3000])
def test_lists_of_any_length_are_read_alike(count: int) -> None:
    ids = [*range(count), np.int32(7), 2**63 - 1]
    for kind in (list, tuple):
        assert read_ids("page_ids", kind(ids)).tolist() == [int(number) for number in ids]
    assert error_text(read_ids, "page_ids", [*ids, None]) == (
        f"TypeError: page_ids[{len(ids)}] is None; it must be an integer"
    )


@pytest.mark.gpu
def test_ids_on_the_gpu_are_refused() -> None:
    with pytest.raises(ValueError, match=r"page_ids is on cuda:0.*pass page_ids\.cpu\(\)"):
        read_ids("page_ids", torch.tensor([0], device="cuda:0"))


def test_arrays_stay_resizable_without_memory_for_ids() -> None:
    run_script("""
    import resource
    from array import array
    from pathlib import Path
    from torch_kvswap._native.loader import native
    ids = array("q", bytes(8 * 5_000_000))
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + (20 << 20), -1))
    try:
        native.read_ids("ids", ids)
        raise SystemExit("there was memory")
    except MemoryError:
        ids.append(1)
    """)


# Arguments are converted in one place, and errors name the argument.


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
            lambda value: read_checked_ids("slots", [value]),
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
