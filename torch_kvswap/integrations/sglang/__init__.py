"""torch_kvswap in SGLang, by configuration only:

    --enable-unified-cache-external-linker --unified-cache-external-linker-backend dynamic
    --unified-cache-external-linker-config '{"linker": "KVSwapLinker",
      "linker_module_path": "torch_kvswap.integrations.sglang",
      "linker_extra_config": {"host_bytes": 10737418240}}'

docs/sglang.md describes the options and what happens when a copy fails. SGLang is imported when
KVSwapLinker is first accessed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch_kvswap.integrations.sglang.linker import KVSwapLinker

__all__ = ["KVSwapLinker"]


def __getattr__(name: str) -> Any:
    if name == "KVSwapLinker":
        from torch_kvswap.integrations.sglang.linker import KVSwapLinker

        return KVSwapLinker
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
