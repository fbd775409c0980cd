"""SGLang's memory code from its wheel, without the packages and GPUs that the rest of it needs.

Real: `sglang.srt.mem_cache`, so the radix cache, its components, the linker's factory and wrapper,
the KV pools and allocators; and the server's options. Everything else of SGLang that these import, and what it needs of other
packages, is a placeholder: classes without members, and functions that are mocks.
"""

from __future__ import annotations

import hashlib
import importlib.abc
import importlib.util
import math
import sys
import types
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch

_REAL = (
    "sglang.srt.mem_cache",
    "sglang.srt.arg_groups.arg_utils",
    "sglang.srt.arg_groups.fields",
    "sglang.srt.server_args",
    "sglang.srt.distributed.communication_tags",
    "sglang.srt.model_executor.cuda_graph_config",
    "sglang.srt.environ",
    "sglang.srt.observability.metrics_collector",
    "sglang.srt.session.streaming_session",
    "sglang.srt.utils.invariants",
    "sglang.srt.utils.poll_timer",
    "sglang.srt.utils.rank_consensus_checker",
)
_KERNELS = (
    "sglang.kernels.jit",
    "sglang.kernels.kernel_api_logging",
    "sglang.kernels.ops.kvcache.hicache",
)
_OF_CACHES_ON_GPUS = ("sglang.kernels.ops.memory.allocator",)  # needs triton
_HASH = "sglang.srt.mem_cache.cpp_utils.native_hash"  # SGLang compiles it when it is imported
_NOT_REAL = (  # of another model, and no test needs them
    "sglang.srt.mem_cache.allocator.hisparse",
    "sglang.srt.mem_cache.deepseek_v4_memory_pool",
)
_OTHERS = ("psutil", "sgl_kernel", "pydantic", "triton", "zmq")
_IS_DEVICE = ("is_cpu", "is_cuda", "is_hip", "is_mps", "is_musa", "is_npu", "is_xpu")


class _Placeholder(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = MagicMock(name=name)
        if name[0].isupper() and not name.isupper():
            value = type(name, (), {})
        setattr(self, name, value)
        return value


def _hash_pages(tokens: Any, before: bytes | None, page: int) -> list[str]:
    """As SGLang's own: a chain of SHA-256, one for each page."""
    hashes, last = [], before or b""
    for start in range(0, len(tokens), page):
        last = hashlib.sha256(last + tokens.token_ids[start : start + page].tobytes()).digest()
        hashes.append(last.hex())
    return hashes


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds placeholders, whose submodules may be real."""

    def __init__(self, folder: Path, on_gpu: bool) -> None:
        self._folder, self._on_gpu = folder, on_gpu
        self._real = (*_REAL, *_KERNELS) if on_gpu else _REAL
        if torch.cuda.is_available():
            self._real += _OF_CACHES_ON_GPUS
        absent = [name for name in _OTHERS if importlib.util.find_spec(name) is None]
        self._packages = ("sglang", *absent)

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name.partition(".")[0] not in self._packages:
            return None
        if name not in (_HASH, *_NOT_REAL) and f"{name}.".startswith(
            tuple(f"{real}." for real in self._real)
        ):
            return None
        return ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return _Placeholder(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        module.__path__ = [str(self._folder.joinpath(*module.__name__.split(".")))]
        for name in _IS_DEVICE:
            setattr(module, name, lambda name=name: self._on_gpu and name == "is_cuda")
        module.ceil_align = lambda number, step: math.ceil(number / step) * step
        module.get_bool_env_var = lambda name: False
        module.get_device_module = lambda: torch.cuda if torch.cuda.is_available() else torch.cpu
        if self._on_gpu:
            module.get_cuda_version = lambda: tuple(map(int, torch.version.cuda.split(".")))
        module.async_h2d = lambda values, dtype, device: torch.tensor(values, dtype=dtype)
        if module.__name__ == "sglang.srt.platforms":
            module.current_platform.get_paged_allocator_cls = lambda: None
        elif module.__name__ == _HASH:
            module.get_native_hash = _hash_pages
        elif module.__name__ == "sglang.srt.disaggregation.kv_events":
            module.StorageMedium = MagicMock()
        elif module.__name__ == "sglang.srt.utils.torch_memory_saver_adapter":
            module.TorchMemorySaverAdapter = MagicMock()
        elif module.__name__.endswith("fp4_kv_cache_quant_method"):
            module.UnquantizedKVCacheMethod = MagicMock
        elif module.__name__ == "sglang.srt.runtime_context":
            module.get_disagg = lambda: types.SimpleNamespace(disaggregation_mode="null")
            module.get_memory = lambda: types.SimpleNamespace()
            module.get_serving = lambda: types.SimpleNamespace(weight_version="default")


def install(on_gpu: bool = False) -> None:
    """Makes SGLang's memory code importable. on_gpu: also the kernels of its host pools, which need
    nvcc, apache-tvm-ffi and psutil."""
    spec = importlib.util.find_spec("sglang")
    if spec is not None and spec.origin is not None:
        sys.meta_path.insert(0, _Finder(Path(spec.origin).parents[1], on_gpu))
