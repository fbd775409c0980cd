"""What each vLLM engine of integration_vllm.py is started with."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

THEIRS = {"kv_connector": "OffloadingConnector"}
OURS = {
    "kv_connector": "KVSwapConnector",
    "kv_connector_module_path": "torch_kvswap.integrations.vllm",
}


def engine_settings(options: Namespace, model: str, rows: Path) -> dict[str, dict[str, Any]]:
    """Of each engine that serves the rounds. rows: the folder of their tiers, if they have some."""
    host = int(options.cpu_gib * 2**30)
    tiers: Any = {"secondary_tiers": [{"type": "fs", "root_dir": str(rows)}]}
    own = {"spec_name": "TieringOffloadingSpec", **tiers} if options.tier else {}
    ours = tiers if options.tier else {}
    engines: dict[str, dict[str, Any]] = {
        "plain": {},
        "vLLM's own": connector(host, THEIRS, **own),
        "ours": connector(host, OURS, **ours),
        "ours, lossless": connector(host, OURS, **ours, encoding="lossless"),
    }
    if options.tier or options.latent:
        del engines["ours, lossless"]  # with tiers, and if ranks share them, blocks are raw
    if options.latent and options.tensor_parallel > 1:
        engines["ours, exchange"] = connector(host, OURS, exchange=True)
    small = {"num_gpu_blocks_override": _least_blocks(options)}
    common = _common(options, model)
    if options.recompute:
        for of_engine in engines.values():
            if of_engine:
                of_engine["kv_transfer_config"]["kv_load_failure_policy"] = "recompute"
    return {
        name: common | of_engine | (small if of_engine else {})
        for name, of_engine in engines.items()
    }


def _least_blocks(options: Namespace) -> int:
    of_request = -(-(options.tokens + options.output) // options.block_tokens) + 1
    of_long = -(-_most_tokens(options) // options.block_tokens) + 1
    return int(max(options.running * of_request, of_long) + 2)


def _most_tokens(options: Namespace) -> int:
    return int(max(options.tokens, options.long_tokens) + options.output)


def _common(options: Namespace, model: str) -> dict[str, Any]:
    return {
        "model": model,
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": options.dtype,
        "seed": 0,
        "enforce_eager": options.eager,
        "compilation_config": _graphs(options),
        "max_model_len": _most_tokens(options),
        "max_num_seqs": options.running,
        "max_num_batched_tokens": options.batched,
        "block_size": options.block_tokens,
        "kv_cache_memory_bytes": int(options.gpu_gib * 2**30),
        "gpu_memory_utilization": 0.1,
        "enable_prefix_caching": True,
        "disable_log_stats": False,
        "attention_config": {"backend": options.backend},
        "tensor_parallel_size": options.tensor_parallel,
        "disable_custom_all_reduce": True,  # all by NCCL, whether GPUs reach each other or not
        "preload": options.preload,
    }


def _graphs(options: Namespace) -> dict[str, Any]:
    """Graphs of decoding steps and, between the attentions, of the new tokens of "continued" and
    "long", as servers have them, but nothing is compiled: engines are up soon."""
    if options.eager:
        return {}
    sizes = [2**exponent for exponent in range(options.running.bit_length())]
    sizes += [new + options.block_tokens for new in (options.new, options.long_new)]
    graphs = {"cudagraph_mode": "FULL_AND_PIECEWISE", "cudagraph_capture_sizes": sizes}
    return {"mode": 3, "backend": "eager", **graphs}


def connector(cpu_bytes: int, which: Mapping[str, str], **extra: Any) -> dict[str, Any]:
    """Settings of an engine that offloads. which: the connector; extra: of its options."""
    return {
        "kv_transfer_config": {
            **which,
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"cpu_bytes_to_use": cpu_bytes} | extra,
        }
    }
