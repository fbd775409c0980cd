"""Work of the GPU that transfers run beside, and how long it takes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.nn.functional import layer_norm, scaled_dot_product_attention, silu

SECONDS = 0.06  # of compute in a sample, when nothing runs beside it
_GRAPH_SECONDS = 0.002


class Run(Protocol):
    """Work that has been given to a device."""

    def is_over(self) -> bool: ...

    def milliseconds(self) -> float:
        """What it took; waits for its end."""
        ...


class Compute(Protocol):
    """name: what it does. start: begins it, and returns at once."""

    name: str

    def start(self) -> Run: ...


def computes(device: torch.device) -> list[Compute]:
    """Those of the table. Without a GPU there is none."""
    if device.type != "cuda":
        return [Idle()]
    calls = {"decode": _decode, "attention": _attention, "stream": _stream}
    calls |= {"prefill": _prefill, "GEMM": _gemm}
    return [GraphCompute(name, make(device), device) for name, make in calls.items()]


def _random(device: torch.device, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=device, dtype=torch.bfloat16)


def _decode(device: torch.device) -> Callable[[], object]:
    x, weights = _random(device, 64, 8192), _random(device, 8192, 8192)
    return lambda: x @ weights


def _attention(device: torch.device) -> Callable[[], object]:
    """A new token of 32 sequences with 8 heads, each over 8,192 tokens."""
    query = _random(device, 32, 8, 1, 128)
    keys, values = (_random(device, 32, 8, 8192, 128) for _ in range(2))
    return lambda: scaled_dot_product_attention(query, keys, values)


def _stream(device: torch.device) -> Callable[[], object]:
    """512 MiB, read and written."""
    x = torch.zeros(256 << 20, device=device, dtype=torch.bfloat16)
    return lambda: x.add_(1)


def _prefill(device: torch.device) -> Callable[[], object]:
    """A layer of a rank of a tensor-parallel model, for 2,048 new tokens behind 6,144: kernels of
    some ten microseconds, to which it matters how long each waits for the one before."""
    x, up, down = (_random(device, *shape) for shape in ((2048, 1024), (1024, 5632), (2816, 1024)))
    project = _random(device, 1024, 1280)
    keys, values = (_random(device, 1, 8, 8192, 128) for _ in range(2))

    def layer() -> torch.Tensor:
        query = layer_norm(x, (1024,)) @ project
        query = query[:, :1024].view(1, 2048, 8, 128).transpose(1, 2)
        attended = scaled_dot_product_attention(query, keys, values)
        y = attended.transpose(1, 2).reshape(2048, 1024) + x
        gate, value = (layer_norm(y, (1024,)) @ up).chunk(2, 1)
        return y + (silu(gate) * value) @ down

    return layer


def _gemm(device: torch.device) -> Callable[[], object]:
    """Its kernels hold every SM."""
    x, y = (_random(device, 8192, 8192) for _ in range(2))
    return lambda: x @ y


class GraphCompute:
    """Calls on a stream of the default priority. As graphs of some milliseconds: a stream takes
    about a thousand kernels, then launching more would hold the host up."""

    def __init__(self, name: str, call: Callable[[], object], device: torch.device) -> None:
        self.name = name
        self._call = call  # has the tensors that the graph works on
        self._stream = torch.cuda.Stream(device)
        self._graph = self._captured(call, 1)
        calls = max(1, round(_GRAPH_SECONDS / self._seconds_of(20)))
        self._graph = self._captured(call, calls)
        self._replays = 1
        self._replays = max(1, round(SECONDS / self._seconds_of(10)))

    def _captured(self, call: Callable[[], object], calls: int) -> torch.cuda.CUDAGraph:
        with torch.cuda.stream(self._stream):
            for _ in range(3):  # what is set up at a first call cannot be captured
                call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self._stream):
            for _ in range(calls):
                call()
        return graph

    def _seconds_of(self, replays: int) -> float:
        """Of one replay."""
        self._replays = replays
        self.start().milliseconds()  # the clock rises
        return self.start().milliseconds() / 1e3 / replays

    def start(self) -> Run:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(self._stream):
            start.record()
            for _ in range(self._replays):
                self._graph.replay()
            end.record()
        return _GraphRun(start, end)


class _GraphRun:
    def __init__(self, start: Any, end: Any) -> None:
        self._start, self._end = start, end

    def is_over(self) -> bool:
        return bool(self._end.query())

    def milliseconds(self) -> float:
        self._end.synchronize()
        return float(self._start.elapsed_time(self._end))


class Idle:
    """Nothing, for as long: what moves meanwhile has the device for itself."""

    name = "nothing"

    def start(self) -> Run:
        return _IdleRun()


class _IdleRun:
    def __init__(self) -> None:
        self._end = time.perf_counter() + SECONDS

    def is_over(self) -> bool:
        return time.perf_counter() >= self._end

    def milliseconds(self) -> float:
        time.sleep(max(0.0, self._end - time.perf_counter()))
        return SECONDS * 1e3
