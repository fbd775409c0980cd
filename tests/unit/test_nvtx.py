"""NVTX ranges of jobs, from submission to completion, only when enabled."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from error_text import error_text
from expecttest import assert_expected_inline

from torch_kvswap import HostPool, OffloadHandler, PagedLayout
from torch_kvswap.offload.nvtx import Ranges


class Profiler:
    """Stands in for torch.cuda.nvtx and writes down what it is told."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.names: dict[int, str] = {}

    def mark(self, name: str) -> None:
        self.log.append(f"mark {name}")

    @contextmanager
    def range(self, name: str) -> Iterator[None]:
        self.log.append(f"push {name}")
        yield
        self.log.append(f"pop {name}")

    def range_start(self, name: str) -> int:
        self.log.append(f"start {name}")
        self.names[len(self.log)] = name
        return len(self.log)

    def range_end(self, number: int) -> None:
        self.log.append(f"end {self.names.pop(number)}")


@pytest.fixture
def profiler(monkeypatch: pytest.MonkeyPatch) -> Profiler:
    profiler = Profiler()
    monkeypatch.setattr(torch.cuda, "nvtx", profiler)
    monkeypatch.setenv("KVSWAP_NVTX", "1")
    return profiler


def test_a_submission_and_its_job_are_ranges_with_their_names(profiler: Profiler) -> None:
    ranges = Ranges()
    with ranges.submit("store"):
        ranges.begin(17, "store", 4096)
    with ranges.submit("load"):
        ranges.begin(18, "load", 512)
    ranges.end(18)
    ranges.end(17)
    assert_expected_inline(
        "\n".join(profiler.log),
        """\
mark kvswap handler
push kvswap submit store
start store 17: 4096 bytes
pop kvswap submit store
push kvswap submit load
start load 18: 512 bytes
pop kvswap submit load
end load 18: 512 bytes
end store 17: 4096 bytes""",
    )


def test_a_submission_that_raises_ends_its_range(monkeypatch: pytest.MonkeyPatch) -> None:
    open_ranges: list[str] = []
    monkeypatch.setenv("KVSWAP_NVTX", "1")
    monkeypatch.setattr(torch.cuda.nvtx, "mark", lambda name: None)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", open_ranges.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", open_ranges.pop)
    during: list[str] = []

    def refuse() -> None:
        with Ranges().submit("store"):
            during.extend(open_ranges)
            raise IndexError

    with pytest.raises(IndexError):
        refuse()
    assert (during, open_ranges) == (["kvswap submit store"], [])


@pytest.mark.parametrize("value", [None, "", "0"])
def test_off_nothing_is_called_and_nothing_kept(
    value: str | None, profiler: Profiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    if value is None:
        monkeypatch.delenv("KVSWAP_NVTX")
    else:
        monkeypatch.setenv("KVSWAP_NVTX", value)
    layout = PagedLayout([torch.zeros(2, 4)])
    with OffloadHandler(layout, HostPool(layout, 2)) as handler:
        handler.store(gpu_block_ids=[0], page_ids=[0])
        handler.poll()
    assert profiler.log == []


def test_the_environment_is_read_once(profiler: Profiler, monkeypatch: pytest.MonkeyPatch) -> None:
    ranges = Ranges()
    monkeypatch.setenv("KVSWAP_NVTX", "0")
    ranges.begin(1, "store", 2)
    assert profiler.log[-1] == "start store 1: 2 bytes"
    assert not Ranges().enabled


def test_another_value_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSWAP_NVTX", "yes")
    assert_expected_inline(
        error_text(Ranges),
        """ValueError: KVSWAP_NVTX is 'yes'; set it to 1 for NVTX ranges, or to 0""",
    )


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has NVTX")
def test_a_torch_without_nvtx_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSWAP_NVTX", "1")
    monkeypatch.setattr(torch, "__version__", "2.x")
    assert_expected_inline(
        error_text(Ranges),
        """\
RuntimeError: KVSWAP_NVTX=1 asks for NVTX ranges, which torch 2.x does not have; unset
it, or install a torch with CUDA""",
    )


@pytest.mark.skipif(torch.version.cuda is None, reason="this torch has no NVTX")
def test_the_nvtx_of_torch_takes_the_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSWAP_NVTX", "1")
    ranges = Ranges()
    with ranges.submit("store"):
        ranges.begin(1, "store", 2)
    ranges.end(1)
    assert not ranges._open


def test_only_jobs_that_are_not_reported_are_kept(profiler: Profiler) -> None:
    ranges = Ranges()
    for job_id in range(1000):
        ranges.begin(job_id, "load", 1)
        if job_id >= 3:
            ranges.end(job_id - 3)
    assert sorted(ranges._open) == [997, 998, 999]
    assert len(profiler.names) == 3


def test_a_thread_that_reports_a_job_at_once_waits_until_its_range_is_open(
    profiler: Profiler,
) -> None:
    ranges = Ranges()
    reporting = threading.Thread(target=ranges.end, args=[5])
    with ranges.submit("load"):
        reporting.start()  # the native call has returned; the job has ended already
        ranges.begin(5, "load", 1)
    reporting.join()
    assert profiler.log[-2:] == ["pop kvswap submit load", "end load 5: 1 bytes"]
    assert (ranges._open, profiler.names) == ({}, {})
