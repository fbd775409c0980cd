"""The options of KVSwapConnector in `kv_connector_extra_config`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from torch_kvswap._native.arguments import one_of
from torch_kvswap._native.rendezvous import check_path
from torch_kvswap.copy_method import AUTO, CHOICES, DEFAULT_STAGING_BYTES
from torch_kvswap.encoding.slot import (
    ENCODINGS,
    VERIFY,
    EncodingName,
    VerifyName,
)
from torch_kvswap.integrations import did_you_mean
from torch_kvswap.prefix.manager import POLICIES

# Options that vLLM reads itself.
_OF_VLLM = (
    *("block_size", "blocks_per_chunk", "offload_prompt_only", "self_describing_kv_events"),
)
# Options of vLLM's tiers and of their manager.
_OF_TIERS = (
    *("secondary_tiers", "tier_poll_interval_s", "backpressure", "canonical_layout"),
    "cache_policy_module_path",
)
# Options that vLLM's tiers do not have, and options that a server decides.
_NOT_OF_TIERS = "host_server", "encoding", "verify", "pin_in_background", "exchange"
_OF_SERVER = (
    *("cpu_bytes_to_use", "eviction_policy", "store_threshold", "pin_in_background", "exchange"),
)
_CHOICES = {
    "eviction_policy": POLICIES,
    "copy_method": CHOICES,
    "encoding": ENCODINGS,
    "verify": VERIFY,
}
_LEAST = {"cpu_bytes_to_use": 1, "store_threshold": 0, "staging_bytes": 0}


@dataclass(frozen=True)
class SpecOptions:
    """The options of KVSwapConnector in kv_connector_extra_config, besides vLLM's own.

    Attributes:
        cpu_bytes_to_use (int): host memory of all workers together, in bytes; 0 with host_server.
        eviction_policy (str): "lru" or "arc"; with tiers vLLM reads it.
        store_threshold (int): a chunk is stored when this many requests have contained it.
        copy_method, staging_bytes: see OffloadHandler.
        encoding, verify, pin_in_background: see HostPool.
        host_server (str | None): the path of the socket of a server that has the host memory.
        exchange (bool): workers with equal caches exchange what they load; see OffloadHandler.
    """

    cpu_bytes_to_use: int = 0
    eviction_policy: str = "lru"
    store_threshold: int = 1
    copy_method: str = AUTO
    staging_bytes: int = DEFAULT_STAGING_BYTES
    encoding: EncodingName = "raw"
    verify: VerifyName = "off"
    pin_in_background: bool = False
    host_server: str | None = None
    exchange: bool = False


_OURS = tuple(field.name for field in fields(SpecOptions))


def read_options(config: Mapping[str, Any]) -> SpecOptions:
    """Reads the options. With `secondary_tiers` vLLM reads those of its tiers and their manager.

    Args:
        config (Mapping[str, Any]): kv_connector_extra_config. An option that is None is not set.

    Raises:
        TypeError: host_server is not a str.
        ValueError: an option is unknown or missing, has an invalid value, or contradicts another.
    """
    config = {name: value for name, value in config.items() if value is not None}
    for name, value in config.items():
        if why := _why_not(name, value, config):
            raise ValueError(f"kv_connector_extra_config: {name} is {value!r}; {why}")
    given = {name: config[name] for name in _OURS if name in config}
    if not given.keys() & {"host_server", "cpu_bytes_to_use"}:
        raise ValueError("kv_connector_extra_config needs cpu_bytes_to_use, bytes of host memory")
    return SpecOptions(**given | {name: int(given[name]) for name in _LEAST if name in given})


def _why_not(name: str, value: Any, config: Mapping[str, Any]) -> str:
    """Why an option cannot have this value, and what to do; empty if it can."""
    has_tiers, server = bool(config.get("secondary_tiers")), config.get("host_server")
    known, why = (*_OURS, *_OF_VLLM, *_OF_TIERS), ""
    if name.startswith("kv_") or name == "engine_id":
        why = "put it next to kv_connector_extra_config, in kv_transfer_config itself"
    elif name.startswith("spec_") or name == "sync_load_budget_bytes":
        why = "KVSwapConnector chooses it itself; leave it out"
    elif name not in known:
        why = f"KVSwapConnector does not know it; {did_you_mean(name, known)}"
    elif name in _OF_TIERS and value and not has_tiers:
        why = "it is for vLLM's manager of secondary_tiers, and there are none; leave it out"
    elif has_tiers and name in _NOT_OF_TIERS:
        why = (
            "vLLM's secondary_tiers do not have it; leave it out, or leave out secondary_tiers and "
            "use a host_server with a second tier (docs/serve.md)"
        )
    elif name == "host_server":
        check_path(value, "kv_connector_extra_config: host_server")
    elif server is not None and name in _OF_SERVER:
        why = f"the server at {server} has the host memory and its index; leave it out"
    elif has_tiers and name == "eviction_policy":
        pass  # vLLM may know others
    elif name in _CHOICES and value not in _CHOICES[name]:
        why = f"it must be {one_of(_CHOICES[name])}"
    elif name in ("pin_in_background", "exchange") and not isinstance(value, bool):
        why = "it must be true or false"
    elif name in _LEAST:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (is_number and value >= _LEAST[name] and value % 1 == 0):  # 1e10 is a float
            why = f"it must be a whole number, {_LEAST[name]} or more"
    return why
