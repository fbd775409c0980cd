"""torch_kvswap in vLLM, by configuration only:

    --kv-transfer-config '{"kv_connector": "KVSwapConnector", "kv_role": "kv_both",
      "kv_connector_module_path": "torch_kvswap.integrations.vllm",
      "kv_connector_extra_config": {"cpu_bytes_to_use": 10737418240}}'

docs/vllm.md describes the options, and what happens when a copy fails. vLLM is imported when the
connector is first accessed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch_kvswap.integrations import not_installed

if TYPE_CHECKING:
    from torch_kvswap.integrations.vllm.connector import KVSwapConnector

__all__ = ["KVSwapConnector"]


def __getattr__(name: str) -> Any:
    if name == "KVSwapConnector":
        try:
            import vllm  # noqa: F401
        except ModuleNotFoundError as error:
            raise not_installed("vllm", error) from error
        from torch_kvswap.integrations.vllm.connector import KVSwapConnector

        return KVSwapConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
