"""Results of jobs, and the exceptions for jobs that failed."""

from __future__ import annotations

import copy
import ctypes
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from expecttest import assert_expected_inline

from torch_kvswap._native import abi
from torch_kvswap.handler import (
    BlocksRejectedError,
    DeviceLostError,
    Result,
    SourceFailedError,
    TransferError,
    error_of,
    result_of,
)


def native(state: int, channel: int = abi.LOADS, error: bytes | None = None) -> abi.JobResult:
    return abi.JobResult(
        id=7,
        nbytes=4096,
        link_bytes=3104,
        submit_seconds=1,
        queue_seconds=2,
        copy_seconds=3,
        channel=channel,
        copy_method=2,
        state=state,
        error=error,
    )


def result(state: int, channel: int = abi.LOADS, error: bytes | None = None) -> Result:
    return result_of(native(state, channel, error))


def test_a_result_has_what_the_native_side_says() -> None:
    assert result(abi.DONE) == Result(7, "load", "done", 4096, 3104, "strided", 1, 2, 3, (), None)
    assert result(abi.DONE, abi.STORES).direction == "store"
    assert result(abi.DONE, abi.EXPEDITED).direction == "load"


@pytest.mark.parametrize(
    ("state", "name"), [(abi.DONE, "done"), (abi.FAILED, "failed"), (abi.CANCELLED, "cancelled")]
)
def test_only_a_job_that_is_done_is_ok(state: int, name: str) -> None:
    found = result(state)
    assert (found.state, found.ok) == (name, name == "done")


def test_the_error_of_several_jobs_names_each_and_keeps_their_results() -> None:
    results = [
        result(abi.FAILED, abi.STORES, b"no copy engine"),
        result(abi.CANCELLED),
        result(abi.FAILED, abi.EXPEDITED, "7 \N{MICRO SIGN}s too late".encode()),
    ]
    error = error_of(results)
    assert_expected_inline(
        str(error),
        """store 7 failed: no copy engine; load 7 was cancelled; load 7 failed: 7 µs too late""",
    )
    assert isinstance(error, RuntimeError)
    assert isinstance(results[0].error, RuntimeError)
    assert str(results[0].error) == "no copy engine"
    assert error.results == results
    assert error.results is not results


@pytest.mark.parametrize("duplicate", [lambda it: pickle.loads(pickle.dumps(it)), copy.copy])
def test_the_error_of_jobs_can_be_sent_to_another_process(
    duplicate: Callable[[TransferError], TransferError],
) -> None:
    error = error_of([result(abi.FAILED, abi.STORES, b"no copy engine")])
    error.request = 5  # type: ignore[attr-defined]
    other = duplicate(error)
    assert type(other) is TransferError
    assert str(other) == str(error) == "store 7 failed: no copy engine"
    assert other.results == error.results
    assert str(other.results[0].error) == "no copy engine"
    assert other.request == 5  # type: ignore[attr-defined]


KINDS = {
    abi.OTHER_ERROR: TransferError,
    abi.DEVICE_LOST: DeviceLostError,
    abi.SOURCE_FAILED: SourceFailedError,
    abi.REJECTED: BlocksRejectedError,
}


def failed(kind: int) -> Result:
    found = native(abi.FAILED, abi.LOADS, b"why")
    found.error_kind = kind
    return result_of(found)


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_is_of_the_kind_that_all_of_its_jobs_failed_with(kind: int) -> None:
    one, other = failed(kind), failed(kind)
    assert type(one.error) is KINDS[kind]
    for duplicate in (copy.copy, lambda it: pickle.loads(pickle.dumps(it))):
        assert type(duplicate(error_of([one, other]))) is KINDS[kind]
        assert type(duplicate(one.error)) is KINDS[kind]
    assert type(error_of([one, result(abi.CANCELLED)])) is TransferError
    assert type(error_of([one, failed((kind + 1) % len(KINDS))])) is TransferError


def rejecting(*positions: int) -> Result:
    found = native(abi.FAILED, abi.STORES, b"blocks do not fit")
    found.error_kind = abi.REJECTED
    array = (ctypes.c_int64 * len(positions))(*positions)
    found.rejected, found.rejected_count = ctypes.addressof(array), len(positions)
    return result_of(found)


def test_a_result_and_its_error_name_the_rejected_blocks() -> None:
    one = rejecting(4, 9)
    assert isinstance(one.error, BlocksRejectedError)
    assert one.rejected == one.error.rejected == (4, 9)
    assert ", rejected=(4, 9), error=BlocksRejectedError(" in repr(one)
    assert "rejected=" not in repr(result(abi.DONE))
    error = error_of([one])
    assert isinstance(error, BlocksRejectedError)
    assert (str(error), error.rejected) == ("store 7 failed: blocks do not fit", (4, 9))


def test_an_error_of_several_jobs_leaves_their_rejected_blocks_to_the_results() -> None:
    error = error_of([rejecting(4, 9), rejecting(1)])
    assert isinstance(error, BlocksRejectedError)
    assert error.rejected == ()
    assert [one.rejected for one in error.results] == [(4, 9), (1,)]


@pytest.mark.parametrize("duplicate", [lambda it: pickle.loads(pickle.dumps(it)), copy.copy])
def test_rejected_blocks_survive_pickling(duplicate: Callable[[Any], Any]) -> None:
    one = rejecting(4, 9)
    assert duplicate(one).rejected == duplicate(one).error.rejected == (4, 9)
    assert duplicate(error_of([one])).rejected == (4, 9)


def test_a_tag_is_compared_with_nothing_and_is_not_pickled() -> None:
    tagged = result_of(native(abi.DONE), tag=lambda: "cannot be pickled")
    assert tagged == result(abi.DONE)
    assert "tag" not in repr(result(abi.DONE))
    assert repr(result_of(native(abi.DONE), tag="request 5")).endswith(", tag='request 5')")
    other = pickle.loads(pickle.dumps(tagged))
    assert (other, other.tag) == (tagged, None)
