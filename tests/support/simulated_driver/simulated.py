"""The decorator of tests that run on the simulated driver."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from workers import Workers

from simulated_driver.program import environment

without_cuda = pytest.mark.skipif(
    torch.version.cuda is not None or torch.version.hip is not None,
    reason="the simulated driver needs a PyTorch without CUDA",
)


workers = Workers("simulated_driver.worker", lambda: environment(PYTHONDONTWRITEBYTECODE="1"))


def simulated(body: Callable[..., None]) -> Callable[..., None]:
    """Decorates a test whose first argument is a :class:`Driver`: runs it on the simulated driver.

    It runs in another process, which loads the test's module from its file. Its arguments are
    pickled.
    """
    return without_cuda(workers.runs(body))
