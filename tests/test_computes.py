"""Compute that transfers run beside takes about as long as asked, and does not hold the host up."""

from __future__ import annotations

import time

import pytest
import torch
from computes import Idle, ThreadCompute, computes

pytestmark = pytest.mark.slow  # of a benchmark program


def test_a_machine_without_a_gpu_computes_in_a_thread() -> None:
    (compute,) = computes(torch.device("cpu"), 0.02)
    assert isinstance(compute, ThreadCompute)
    run = compute.start()
    milliseconds = run.milliseconds()
    assert run.is_over()
    assert milliseconds > 1


def test_nothing_takes_as_long_as_asked() -> None:
    start = time.perf_counter()
    run = Idle(0.05).start()
    assert not run.is_over()
    assert run.milliseconds() == 50
    assert run.is_over()
    assert 0.05 <= time.perf_counter() - start < 1


@pytest.mark.gpu
def test_a_gpu_has_four_computes_of_about_the_same_length_on_default_priority() -> None:
    of_gpu = computes(torch.device("cuda", torch.cuda.current_device()), 0.03)
    assert [compute.name for compute in of_gpu] == ["decode", "attention", "stream", "GEMM"]
    for compute in of_gpu:
        assert compute._stream.priority == 0
        start = time.perf_counter()
        run = compute.start()
        given = time.perf_counter() - start
        assert not run.is_over()
        assert 15 < run.milliseconds() < 60
        assert given < 0.015
