"""torch_kvswap in vLLM, by configuration only:

    --kv-transfer-config '{"kv_connector": "KVSwapConnector", "kv_role": "kv_both",
      "kv_connector_module_path": "torch_kvswap.integrations.vllm",
      "kv_load_failure_policy": "recompute",
      "kv_connector_extra_config": {"cpu_bytes_to_use": 10737418240}}'

docs/vllm.md describes the options, and what happens when a copy fails. vLLM is imported when the
connector is first accessed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch_kvswap.integrations.vllm.connector import KVSwapConnector

__all__ = ["KVSwapConnector"]


def __getattr__(name: str) -> Any:
    if name == "KVSwapConnector":
        try:
            import vllm  # noqa: F401
        except ImportError as error:
            raise ImportError(
                "torch_kvswap.integrations.vllm needs vLLM 0.33 or later: pip install vllm"
            ) from error
        from torch_kvswap.integrations.vllm.connector import KVSwapConnector

        return KVSwapConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
