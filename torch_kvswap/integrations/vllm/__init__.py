"""An OffloadingSpec for vLLM's OffloadingConnector, enabled by configuration only:

    --kv-transfer-config '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both",
      "kv_connector_extra_config": {"spec_name": "KVSwapOffloadingSpec",
        "spec_module_path": "torch_kvswap.integrations.vllm", "cpu_bytes_to_use": 10737418240}}'

docs/vllm.md describes the options, and what happens when a copy fails. vLLM is imported when
KVSwapOffloadingSpec is first accessed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch_kvswap.integrations.vllm.patch import patch_ops

if TYPE_CHECKING:
    from torch_kvswap.integrations.vllm.spec import KVSwapOffloadingSpec

__all__ = ["KVSwapOffloadingSpec", "patch_ops"]


def __getattr__(name: str) -> Any:
    if name != "KVSwapOffloadingSpec":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from torch_kvswap.integrations.vllm.spec import KVSwapOffloadingSpec

    return KVSwapOffloadingSpec
