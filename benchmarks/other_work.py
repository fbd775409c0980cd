"""What else a server does between two transfers: it evicts their code and data from the caches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import cycle, islice

import numpy as np
import torch
from timing import synchronize

CALLS = 200  # of PyTorch, on the device and on the CPU
MIB, MIB_WITHOUT_GPU = 256, 4  # of host memory, which one thread reads


class OtherWork:
    """Reads host memory, calls PyTorch, and waits until the device is idle."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory = np.ones((MIB if device.type == "cuda" else MIB_WITHOUT_GPU) << 17, np.int64)
        self._calls = cycle(_torch_calls(device))
        self()  # what PyTorch loads at a first call is no work of a running server

    def __call__(self) -> None:
        self._memory.sum()
        for call in islice(self._calls, CALLS):
            call()
        synchronize(self._device)


def _torch_calls(device: torch.device) -> Iterator[Callable[[], object]]:
    """Of the kinds that a model, a sampler and a scheduler make."""
    x, on_cpu = torch.ones(64, 64, device=device), torch.ones(256)
    ids = torch.arange(64, device=device)
    yield lambda: x @ x
    yield lambda: x + 1
    yield lambda: torch.softmax(x, -1)
    yield lambda: torch.nn.functional.layer_norm(x, (64,))
    yield lambda: torch.nn.functional.silu(x)
    yield lambda: x.index_select(0, ids)
    yield lambda: torch.cat((x, x))
    yield lambda: x.t().contiguous()
    yield lambda: x.to(torch.float16)
    yield lambda: torch.zeros_like(x).copy_(x)
    yield lambda: torch.where(x > 0, x, 0)
    yield lambda: x.topk(4)
    yield lambda: x.cumsum(0)
    yield lambda: x[0].argmax().item()
    yield lambda: torch.arange(64).to(device)
    yield lambda: on_cpu.sort()
    yield lambda: on_cpu.tolist()
    yield lambda: torch.stack([on_cpu, on_cpu])
    yield lambda: torch.randperm(256)
    yield lambda: (on_cpu * 2).sum()
