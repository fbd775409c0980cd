"""torch_kvswap in vLLM, by configuration only:

    --kv-transfer-config '{"kv_connector": "KVSwapConnector", "kv_role": "kv_both",
      "kv_connector_module_path": "torch_kvswap.integrations.vllm",
      "kv_load_failure_policy": "recompute",
      "kv_connector_extra_config": {"cpu_bytes_to_use": 10737418240}}'

KVSwapOffloadingSpec is for vLLM's own OffloadingConnector. KVSwapTieringOffloadingSpec puts vLLM's
secondary tiers below the host memory, with either connector. docs/vllm.md describes all of them,
and what happens when a copy fails. vLLM is imported when one of them is first accessed.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from torch_kvswap.integrations.vllm.patch import patch_ops

if TYPE_CHECKING:
    from torch_kvswap.integrations.vllm.connector import KVSwapConnector
    from torch_kvswap.integrations.vllm.spec import KVSwapOffloadingSpec
    from torch_kvswap.integrations.vllm.tiering import KVSwapTieringOffloadingSpec

__all__ = ["KVSwapConnector", "KVSwapOffloadingSpec", "KVSwapTieringOffloadingSpec", "patch_ops"]
_MODULES = {
    "KVSwapConnector": "connector",
    "KVSwapOffloadingSpec": "spec",
    "KVSwapTieringOffloadingSpec": "tiering",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
