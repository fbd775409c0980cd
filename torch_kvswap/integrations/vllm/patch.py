"""torch_kvswap's copies under vLLM's own offloading worker."""

from __future__ import annotations

import gc
import logging
import os
import sys
from typing import Any

from torch_kvswap.integrations.vllm.log import write_where_vllm_does
from torch_kvswap.ops import swap_blocks_batch

_WORKER = "vllm.v1.kv_offload.cpu.gpu_worker"
_log = logging.getLogger(__name__)


def patch_ops() -> str:
    """Replaces vLLM's op swap_blocks_batch with torch_kvswap's in this process.

    Call it in the process that runs the model, before vLLM builds its offloading worker, or set
    KVSWAP_PATCH_OPS=1: vLLM then calls it in every process. Calling it again changes nothing.
    KVSwapOffloadingSpec does not need it.

    Returns:
        str: what still uses vLLM's own kernels; also logged.

    Raises:
        RuntimeError: the worker already exists, and has looked up its copy functions.
        ImportError: vLLM is not installed.
    """
    from vllm import _custom_ops

    write_where_vllm_does()
    if _custom_ops.swap_blocks_batch is not swap_blocks_batch:
        _check_not_built()
        _custom_ops.swap_blocks_batch = swap_blocks_batch
    from vllm.v1.kv_offload.cpu.swap_blocks_triton import MIN_N, THRESHOLD_BYTES

    stays = (
        "torch_kvswap copies stores, and loads of few or large pieces. vLLM's Triton kernel still "
        f"copies loads of {MIN_N} or more pieces if every layer has less than {THRESHOLD_BYTES} "
        "bytes per block, and other ops of vLLM are unchanged"
    )
    _log.info("patch_ops: %s", stays)
    return stays


def patch_ops_if_asked() -> None:
    """vLLM's plugin, which it calls in every process: patch_ops() with KVSWAP_PATCH_OPS=1.

    Raises:
        ValueError: the variable has an unknown value.
    """
    asked = os.environ.get("KVSWAP_PATCH_OPS") or "0"
    if asked not in ("0", "1"):
        raise ValueError(f"KVSWAP_PATCH_OPS is {asked!r}; expected 0 or 1")
    if asked == "1":
        patch_ops()


def _check_not_built() -> None:
    module: Any = sys.modules.get(_WORKER)
    if module is None:
        return
    handler = module.SingleDirectionOffloadingHandler
    if any(type(each) is handler for each in gc.get_objects()):
        raise RuntimeError(
            "patch_ops() must be called before vLLM builds its offloading worker, which keeps the "
            "copy functions it found; call it earlier in this process, or use KVSwapOffloadingSpec"
        )
