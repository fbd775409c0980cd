"""The decorators of tests that run on the simulated driver."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from workers import Workers, runs_in

from simulated_driver.program import environment

without_cuda = pytest.mark.skipif(
    torch.version.cuda is not None or torch.version.hip is not None,
    reason="the simulated driver needs a PyTorch without CUDA",
)


def _workers(**variables: str) -> Workers:
    return Workers(
        "simulated_driver.worker", lambda: environment(PYTHONDONTWRITEBYTECODE="1", **variables)
    )


workers, workers_on_hip = _workers(), _workers(SIMULATED_FACE="hip")


def simulated(body: Callable[..., None]) -> Callable[..., None]:
    """Decorates a test whose first argument is a :class:`Driver`: runs it on the simulated driver.

    It runs in another process, which loads the test's module from its file. Its arguments are
    pickled.
    """
    return without_cuda(workers.runs(body))


def simulated_on_hip(body: Callable[..., None]) -> Callable[..., None]:
    """As :func:`simulated`, with HIP's functions instead of those of CUDA's driver."""
    return without_cuda(workers_on_hip.runs(body))


def simulated_on_both(body: Callable[..., None]) -> Callable[..., None]:
    """As :func:`simulated`, once with the functions of CUDA's driver and once with HIP's."""
    of = {"CUDA": workers, "HIP": workers_on_hip}
    test = runs_in(body, lambda arguments: of[arguments.pop("runtime")], "runtime")
    return without_cuda(pytest.mark.parametrize("runtime", of)(test))
