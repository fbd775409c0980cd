"""Engines with vLLM's file tier below its host memory, and vLLM's own worker without a GPU."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import vllm_engine  # noqa: F401  skips where vLLM's tests do not run
from vllm.v1.kv_offload.cpu import gpu_worker
from vllm.v1.kv_offload.cpu import spec as cpu_spec

from torch_kvswap.ops import swap_blocks_batch


def tier(folder: Path, **more: Any) -> dict[str, Any]:
    """Of kv_connector_extra_config."""
    return {"secondary_tiers": [{"type": "fs", "root_dir": f"{folder}/rows"}], **more}


class _OnCpu:
    """A stream, or an event, of a device that does everything at once."""

    def __init__(self, **_: Any) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Any) -> float:
        return 1.0

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


class _Handler(gpu_worker.SingleDirectionOffloadingHandler):  # type: ignore[misc]
    def __init__(self, **how: Any) -> None:
        with mock.patch.object(torch.Tensor, "is_xpu", True, create=True):
            super().__init__(**how)

    def transfer_async(self, *job: Any) -> bool:
        with mock.patch.object(torch, "Event", _OnCpu):
            return bool(super().transfer_async(*job))


def without_gpu(patch: pytest.MonkeyPatch) -> None:
    """vLLM's own worker moves blocks of a cache on the CPU."""
    no, yes = (lambda: False), (lambda: True)
    platform = SimpleNamespace(is_cuda_alike=yes, is_xpu=no, is_rocm=no, Stream=_OnCpu)
    platform.current_stream, platform.stream = _OnCpu, contextlib.nullcontext
    for module in (gpu_worker, cpu_spec):
        patch.setattr(module, "current_platform", platform)
    patch.setattr(gpu_worker, "SingleDirectionOffloadingHandler", _Handler)
    patch.setattr(gpu_worker, "PIN_MEMORY", False)
    patch.setattr(gpu_worker.ops, "swap_blocks_batch", swap_blocks_batch)
