"""The computations beside which transfers are measured take about as long as asked."""

from __future__ import annotations

from typing import Any

import computes as computes_module
import pytest
import torch
from computes import Idle, ThreadCompute, computes
from fake_clock import Clock
from patience import in_time

pytestmark = pytest.mark.slow  # of a benchmark program


def test_a_machine_without_a_gpu_computes_in_a_thread() -> None:
    (compute,) = computes(torch.device("cpu"), 0.02)
    assert isinstance(compute, ThreadCompute)
    run = compute.start()
    milliseconds = run.milliseconds()
    assert run.is_over()
    assert milliseconds > 0


def test_nothing_takes_as_long_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(computes_module, "time", clock := Clock())
    run = Idle(0.05).start()
    clock.sleep(0.04)
    assert not run.is_over()
    assert run.milliseconds() == 50
    assert run.is_over()
    assert clock.now == pytest.approx(0.05)


def returns_first(compute: Any) -> bool:
    """Whether start() returns before what it has started is over."""
    run = compute.start()
    is_over = run.is_over()
    run.milliseconds()
    return not is_over


@pytest.mark.gpu
def test_a_gpu_has_four_computes_of_about_the_same_length_on_default_priority() -> None:
    of_gpu = computes(torch.device("cuda", torch.cuda.current_device()), 0.03)
    assert [compute.name for compute in of_gpu] == ["decode", "attention", "stream", "GEMM"]
    for compute in of_gpu:
        assert compute._stream.priority == 0
        run = compute.start()
        assert in_time(run.is_over)
        assert 15 < run.milliseconds() < 60  # on the clock of the GPU
        assert in_time(lambda compute=compute: returns_first(compute))
