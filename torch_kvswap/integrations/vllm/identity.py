"""What engines compare before they share pages.

Engines share pages if they were started with equal options. Left out are options that engines of
one machine cannot have equal, secrets, what is described elsewhere, schedules and logs.

vLLM's compute_hash() is for compiled graphs. It leaves out hf_overrides, how weights are loaded and
how media are processed.
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

_LEFT_OUT = (  # fields of vLLM's configuration
    # Ranks, devices, addresses, ids, and what vLLM measures or fills in while it runs.
    "parallel_config device_config compilation_config kv_transfer_config kv_events_config "
    "ec_transfer_config instance_id gpu_memory_utilization kv_cache_memory_bytes "
    "num_gpu_blocks_override "
    # Secrets, and a dictionary that may have some.
    "hf_token watermark_config ec_manager_config "
    # Described by hf_config, by the target model or with the cache.
    "hf_overrides quant_config target_model_config target_parallel_config draft_parallel_config "
    "draft_tensor_parallel_size "
    # Schedules and logs.
    "scheduler_config observability_config logging_config profiler_config watchdog_config "
    "enforce_eager"
)
# How names of environment variables end that are addresses, ranks, cores or names.
_OF_ONE_ENGINE = ("_HOST", "_IP", "_PORT", "_RANK", "_RANK_LOCAL", "_BIND", "_PREFIX")


def describe_engine(config: Any) -> dict[str, Any]:
    """The options of a VllmConfig, and of the environment what vLLM compiles for, as JSON can hold
    them. LoRA adapters, media and salts are in vLLM's hashes of blocks.

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
        if name.startswith("VLLM_") and name in os.environ and not name.endswith(_OF_ONE_ENGINE)
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
        # Its words are no paths, such as the model type "opt". Its own path is a field of vLLM.
        fields = json.loads(text) if isinstance(text, str) else dict(text)
        fields["_name_or_path"] = None
        return {**fields, "_commit_hash": getattr(value, "_commit_hash", None)}
    if dataclasses.is_dataclass(value):
        # What a constructor does not take vLLM computes, also from what it measures.
        names = [
            one.name
            for one in dataclasses.fields(value)
            if one.init or one.name in ("hf_config", "hf_text_config")
        ]
        left_out = _LEFT_OUT.split()
        return _plain({name: getattr(value, name, None) for name in names if name not in left_out})
    if isinstance(value, Mapping):
        named = {str(name): _plain(one) for name, one in value.items()}
        if secrets := named.get("model_loader_extra_config"):
            text = json.dumps(secrets, sort_keys=True)
            named["model_loader_extra_config"] = hashlib.sha256(text.encode()).hexdigest()
        return dict(sorted(named.items()))
    if isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray)):
        return [_plain(one) for one in value]
    return value.compute_hash() if hasattr(value, "compute_hash") else normalize_value(value)
