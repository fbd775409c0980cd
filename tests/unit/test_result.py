"""Results of jobs, and the exceptions for jobs that failed."""

from __future__ import annotations

import copy
import ctypes
import gc
import pickle
from dataclasses import FrozenInstanceError, fields, replace
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline

from torch_kvswap import HostPool, OffloadHandler, PagedLayout
from torch_kvswap.results import (
    BlocksRejectedError,
    DeviceLostError,
    Result,
    SourceFailedError,
    TransferError,
    error_of,
)

DONE = Result(7, "load", "done", 4096, 3104, "strided", 1, 2, 3, (), None)
CANCELLED = replace(DONE, state="cancelled")


def failed(error: TransferError, direction: Any = "load") -> Result:
    return replace(DONE, direction=direction, state="failed", error=error)


def test_native_results_equal_pythons() -> None:
    layout, tag = PagedLayout([torch.zeros(4, 6)]), object()
    with OffloadHandler(layout, HostPool(layout, 1)) as handler:
        handler.store(gpu_block_ids=[1], page_ids=[0], tag=tag)
        (result,) = handler.poll()
    assert [*vars(result)] == [field.name for field in fields(Result)]
    assert result == Result(**vars(result))
    assert hash(result) == hash(Result(**vars(result)))
    assert (result.job_id, result.direction, result.state) == (0, "store", "done")
    assert (result.nbytes, result.link_bytes, result.copy_method) == (24, 24, "host")
    assert (result.rejected, result.error, result.tag) == ((), None, tag)
    with pytest.raises(FrozenInstanceError):
        result.tag = None  # type: ignore[misc]


def test_errors_of_several_jobs_name_each() -> None:
    results = [
        failed(TransferError("no copy engine"), "store"),
        CANCELLED,
        failed(TransferError("too late")),
    ]
    error = error_of(results)
    assert_expected_inline(
        str(error),
        """store 7 failed: no copy engine; load 7 was cancelled; load 7 failed: too late""",
    )
    assert isinstance(error, RuntimeError)
    assert error.results == results
    assert error.results is not results


KINDS = (TransferError, DeviceLostError, SourceFailedError, BlocksRejectedError)


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_has_its_jobs_common_kind(kind: type[TransferError]) -> None:
    one, other = failed(kind("why")), failed(kind("why"))
    error = error_of([one, other])
    error.request = 5  # type: ignore[attr-defined]
    for duplicate in (copy.copy, lambda it: pickle.loads(pickle.dumps(it))):
        again = duplicate(error)
        assert (type(again), str(again), again.request) == (kind, str(error), 5)
        assert again.results == error.results
        assert type(duplicate(one.error)) is kind
    assert type(error_of([one, CANCELLED])) is TransferError
    of_another_kind = KINDS[(KINDS.index(kind) + 1) % len(KINDS)]
    assert type(error_of([one, failed(of_another_kind("why"))])) is TransferError


def rejecting(*positions: int) -> Result:
    error = BlocksRejectedError("blocks do not fit", rejected=positions)
    return replace(failed(error, "store"), rejected=positions)


def test_results_and_errors_name_rejected_blocks() -> None:
    one = rejecting(4, 9)
    assert ", rejected=(4, 9), error=BlocksRejectedError(" in repr(one)
    error = error_of([one])
    assert isinstance(error, BlocksRejectedError)
    assert (str(error), error.rejected) == ("store 7 failed: blocks do not fit", (4, 9))


def test_a_tag_is_not_compared_or_pickled() -> None:
    tagged = replace(DONE, tag=lambda: "cannot be pickled")
    assert tagged == DONE
    other = pickle.loads(pickle.dumps(tagged))
    assert (other, other.tag) == (tagged, None)


# How much memory a handler keeps for ended jobs whose results nobody has fetched.


JOBS = 20_000
MOST_BYTES = 160  # of a job; there is nothing else to keep than its result


class Mallinfo2(ctypes.Structure):
    _fields_ = (
        ("of_arenas_and_maps", ctypes.c_size_t * 7),
        ("uordblks", ctypes.c_size_t),
        ("of_free_blocks", ctypes.c_size_t * 2),
    )


def bytes_in_use() -> int:
    """Of what malloc has given out."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallinfo2"):
        pytest.skip("a C library without mallinfo2")
    libc.mallinfo2.restype = Mallinfo2
    gc.collect()
    return int(libc.mallinfo2().uordblks)


def test_a_done_job_keeps_only_its_result() -> None:
    layout = PagedLayout([torch.zeros(64, 8, dtype=torch.uint8)])
    ids = list(range(64))
    with OffloadHandler(layout, HostPool(layout, num_pages=64)) as handler:
        for _ in range(100):
            handler.store(gpu_block_ids=ids, page_ids=ids)
        before = bytes_in_use()
        for _ in range(JOBS):
            handler.store(gpu_block_ids=ids, page_ids=ids)
        after = bytes_in_use()
        assert (after - before) / JOBS < MOST_BYTES
        reported = handler.poll()
        assert [result.job_id for result in reported] == list(range(100 + JOBS))
        del reported
        assert bytes_in_use() - before < MOST_BYTES * JOBS / 10
