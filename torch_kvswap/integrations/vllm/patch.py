"""vLLM's own offloading worker with our copies under it."""

from __future__ import annotations

import gc
import logging
import sys
from typing import Any

from torch_kvswap.ops import swap_blocks_batch

_WORKER = "vllm.v1.kv_offload.cpu.gpu_worker"
_log = logging.getLogger(__name__)


def patch_ops() -> str:
    """Puts `torch_kvswap.ops.swap_blocks_batch` in the place of vLLM's op of that name in this
    process. Returns, and logs, what stays on vLLM's own kernels.

    Call it in the process that runs the model, before vLLM builds its offloading worker there, for
    instance from a plugin of the group vllm.general_plugins, which vLLM loads in every process.
    Calling it again changes nothing. Raises RuntimeError when the worker is there already: it has
    looked up its copies. KVSwapOffloadingSpec needs none of this.
    """
    from vllm import _custom_ops

    if _custom_ops.swap_blocks_batch is not swap_blocks_batch:
        _check_not_built()
        _custom_ops.swap_blocks_batch = swap_blocks_batch
    from vllm.v1.kv_offload.cpu.swap_blocks_triton import MIN_N, THRESHOLD_BYTES

    stays = (
        "stores, and loads of pieces that are large or few, are copied by torch_kvswap. On vLLM's "
        f"Triton kernel stay loads of {MIN_N} or more pieces when every layer has less than "
        f"{THRESHOLD_BYTES} bytes a block, and what else uses other ops of vLLM"
    )
    _log.info("patch_ops: %s", stays)
    return stays


def _check_not_built() -> None:
    module: Any = sys.modules.get(_WORKER)
    if module is None:
        return
    handler = module.SingleDirectionOffloadingHandler
    if any(type(each) is handler for each in gc.get_objects()):
        raise RuntimeError(
            "patch_ops() has to come before vLLM builds its offloading worker, which has kept the "
            "copies it found; call it earlier in this process, or use KVSwapOffloadingSpec"
        )
