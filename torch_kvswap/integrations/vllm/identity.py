"""What decides the bytes of an engine's blocks: engines share pages only if all of it is equal.

vLLM's compute_hash() is for compiled graphs. It leaves out hf_overrides, how weights are loaded and
how media are processed, and has sizes of batches and ranks, which equal engines need not share.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

from vllm import envs
from vllm.config.utils import normalize_value

from torch_kvswap.integrations import real_path

# All fields of vLLM's configuration count, also those of a later release, but not these: they
# concern tokens, requests, schedules, ranks, memory, compilation, addresses, logs or files of one
# engine, are secret, or follow from others.
_OTHERS = {
    "VllmConfig": "parallel_config scheduler_config device_config aux_output_config "
    "watermark_config structured_outputs_config observability_config logging_config quant_config "
    "compilation_config profiler_config kv_transfer_config kv_events_config ec_transfer_config "
    "ec_manager_config reasoning_config instance_id optimization_level performance_mode "
    "weight_transfer_config watchdog_config shutdown_timeout",
    "ModelConfig": "tokenizer tokenizer_mode tokenizer_revision skip_tokenizer_init seed "
    "hf_config_path hf_overrides allowed_local_media_path allowed_media_domains enforce_eager "
    "return_sampling_mask max_logprobs logprobs_mode use_fp64_gumbel enable_trace_replay "
    "served_model_name hf_token generation_config override_generation_config enable_sleep_mode "
    "sleep_preserve_parameter_names sleep_mode_backend sleep_mode_offload_cudagraph "
    "enable_nccl_comm_suspend enable_cumem_allocator logits_processors io_processor_plugin "
    "renderer_num_workers pooler_config",
    "MultiModalConfig": "mm_processor_cache_gb mm_processor_cache_type "
    "mm_shm_cache_max_object_size_mb mm_encoder_tp_mode mm_encoder_fp8_scale_save_path "
    "mm_encoder_fp8_scale_save_margin skip_mm_profiling mm_tensor_ipc mm_ipc_gpu_memory_gb",
    "CacheConfig": "user_specified_block_size gpu_memory_utilization num_gpu_blocks_override "
    "enable_prefix_caching prefix_cache_retention_interval num_gpu_blocks num_cpu_blocks "
    "simple_cpu_offload_num_blocks effective_attention_block_size kv_cache_size_tokens "
    "kv_cache_max_concurrency hash_block_size cache_hit_alignment_tokens kv_cache_memory_bytes "
    "kv_offloading_size kv_offloading_backend _block_size_resolved",
    "KernelConfig": "ir_op_priority enable_cutedsl_warmup enable_jit_warmup",
    "LoadConfig": "download_dir safetensors_load_strategy safetensors_prefetch_num_threads "
    "safetensors_prefetch_block_size device use_tqdm_on_load pt_load_map_location",
    "LoRAConfig": "max_loras max_cpu_loras",
    "SpeculativeConfig": "enforce_eager draft_tensor_parallel_size tensor_parallel_size "
    "target_model_config target_parallel_config draft_parallel_config",
}
_OF_ONE_ENGINE = (  # environment variables
    "VLLM_CPU_OMP_THREADS_BIND",
    "VLLM_DP_RANK",
    "VLLM_DP_RANK_LOCAL",
    "VLLM_DP_SIZE",
    "VLLM_EC_SIDE_CHANNEL_HOST",
    "VLLM_EC_SIDE_CHANNEL_PORT",
    "VLLM_LOOPBACK_IP",
    "VLLM_MOONCAKE_BOOTSTRAP_PORT",
    "VLLM_NIXL_SIDE_CHANNEL_PORT",
    "VLLM_P2P_SIDE_CHANNEL_HOST",
    "VLLM_P2P_SIDE_CHANNEL_PORT",
    "VLLM_PROCESS_NAME_PREFIX",
)


def describe_engine(config: Any) -> dict[str, Any]:
    """The fields that count of a VllmConfig, and of the environment what vLLM compiles for, as JSON
    can hold them. LoRA adapters, media and salts are in vLLM's hashes of blocks.

    Raises:
        ValueError: vLLM names media by their number in this engine, not by their contents.
        TypeError: a field has a value that two engines cannot compare.
    """
    media = config.model_config.multimodal_config
    if media and not media.mm_processor_cache_gb and not config.cache_config.enable_prefix_caching:
        raise ValueError(
            "kv_connector_extra_config: with host_server, images and other media need names that "
            "are equal in all engines, but mm_processor_cache_gb is 0 and prefix caching is off; "
            "change one of the two"
        )
    environment = {
        name: value
        for name, value in envs.compile_factors().items()
        if name.startswith("VLLM_") and name in os.environ and name not in _OF_ONE_ENGINE
    }
    described: dict[str, Any] = _plain(config)
    return {**described, "environment": _plain(environment)}


def _plain(value: Any) -> Any:
    """A value as JSON can hold it. Others than those of vLLM's configuration raise TypeError."""
    if isinstance(value, str):
        return real_path(value)
    if isinstance(value, Enum):
        return value.name
    if hasattr(value, "to_json_string"):  # a model's configuration, after hf_overrides
        text = normalize_value(value)
        fields = json.loads(text) if isinstance(text, str) else dict(text)
        return _plain({**fields, "_commit_hash": getattr(value, "_commit_hash", None)})
    if dataclasses.is_dataclass(value):
        others = _OTHERS.get(type(value).__name__, "").split()
        names = [field.name for field in dataclasses.fields(value) if field.name not in others]
        return _plain({name: getattr(value, name, None) for name in names})
    if isinstance(value, Mapping):
        named = {str(name): _plain(one) for name, one in value.items() if name != "_name_or_path"}
        if secrets := named.get("model_loader_extra_config"):
            text = json.dumps(secrets, sort_keys=True)
            named["model_loader_extra_config"] = hashlib.sha256(text.encode()).hexdigest()
        return dict(sorted(named.items()))
    if isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray)):
        return [_plain(one) for one in value]
    return value.compute_hash() if hasattr(value, "compute_hash") else normalize_value(value)
