"""What each vLLM engine of integration_vllm.py is started with."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

SPEC = {
    "spec_name": "KVSwapOffloadingSpec",
    "spec_module_path": "torch_kvswap.integrations.vllm",
}


def engine_settings(options: Namespace, model: str) -> dict[str, dict[str, Any]]:
    """Of each engine, that of the hits last."""
    of_request = -(-(options.tokens + options.output) // options.block_tokens) + 1
    least = options.running * of_request + 2
    small = {"num_gpu_blocks_override": least}
    common = {
        "model": model,
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": options.dtype,
        "seed": 0,
        "enforce_eager": options.eager,
        "compilation_config": _graphs(options),
        "max_model_len": options.tokens + options.output,
        "max_num_seqs": options.running,
        "max_num_batched_tokens": options.batched,
        "block_size": options.block_tokens,
        "kv_cache_memory_bytes": int(options.gpu_gib * 2**30),
        "gpu_memory_utilization": 0.1,
        "enable_prefix_caching": True,
        "disable_log_stats": False,
        "attention_config": {"backend": options.backend},
        "preload": options.preload,
    }
    host = int(options.cpu_gib * 2**30)
    engines = {
        "plain": {},
        "vLLM's own": small | connector(host),
        "ours": small | connector(host, **SPEC),
        "hits": small | connector(hits_pages(options) * block_bytes(options), **SPEC),
    }
    return {name: common | of_engine for name, of_engine in engines.items()}


def _graphs(options: Namespace) -> dict[str, Any]:
    """Whole batches of few tokens as graphs, as servers have them, but nothing compiled: engines
    are up soon."""
    if options.eager:
        return {}
    sizes = [2**exponent for exponent in range(9)]
    return {"mode": 0, "cudagraph_mode": "FULL", "cudagraph_capture_sizes": sizes}


def connector(cpu_bytes: int, **extra: Any) -> dict[str, Any]:
    """Settings of an engine that offloads; extra: for the spec, none for vLLM's own."""
    return {
        "kv_transfer_config": {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"cpu_bytes_to_use": cpu_bytes} | extra,
        }
    }


def hits_pages(options: Namespace) -> int:
    """Too few for all prompts, enough for some."""
    return int(6 * (hits_tokens(options) // options.block_tokens))


def hits_tokens(options: Namespace) -> int:
    return min(int(options.tokens), 2048)


def block_bytes(options: Namespace) -> int:
    element = 4 if options.dtype == "float32" else 2
    of_token = 2 * options.layers * options.kv_heads * options.head_size * element
    return int(options.block_tokens * of_token)
