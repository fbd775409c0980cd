"""The options of KVSwapConnector in `kv_connector_extra_config`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from torch_kvswap._native.rendezvous import SCHEME
from torch_kvswap.copy_method import CHOICES, DEFAULT_STAGING_BYTES
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
    *("block_size", "blocks_per_chunk", "offload_prompt_only"),
    *("self_describing_kv_events", "sync_load_budget_bytes"),
)
# Options of vLLM's tiers and of their manager.
_OF_TIERS = (
    *("secondary_tiers", "tier_poll_interval_s", "backpressure", "canonical_layout"),
    *("cache_policy_module_path", "max_tracker_size"),
)
# Options that vLLM's tiers do not have, and their defaults.
_NOT_OF_TIERS = {
    **{"host_server": None, "encoding": "raw", "verify": "off", "pin_in_background": False},
}
_CHOICES = {
    "eviction_policy": POLICIES,
    "copy_method": CHOICES,
    "encoding": ENCODINGS,
    "verify": VERIFY,
}
# Options that a server decides, and the defaults that an engine may still name.
_OF_SERVER = {
    **{"cpu_bytes_to_use": None, "eviction_policy": "lru", "store_threshold": 1},
    "pin_in_background": False,
}
_LEAST = {"cpu_bytes_to_use": 1, "store_threshold": 0, "staging_bytes": 0}


@dataclass(frozen=True)
class SpecOptions:
    """The options of KVSwapConnector in kv_connector_extra_config, beside vLLM's own.

    Attributes:
        cpu_bytes_to_use (int): host memory of all workers together, in bytes; 0 with host_server.
        eviction_policy (str): "lru" or "arc".
        store_threshold (int): number of times that a chunk is offered before it is stored.
        copy_method, staging_bytes: see OffloadHandler.
        encoding, verify, pin_in_background: see HostPool.
        host_server (str | None): the socket of a server that has the host memory.
    """

    cpu_bytes_to_use: int = 0
    eviction_policy: str = "lru"
    store_threshold: int = 1
    copy_method: str | None = None
    staging_bytes: int = DEFAULT_STAGING_BYTES
    encoding: EncodingName = "raw"
    verify: VerifyName = "off"
    pin_in_background: bool = False
    host_server: str | None = None


_OURS = tuple(field.name for field in fields(SpecOptions))


def read_options(config: Mapping[str, Any]) -> SpecOptions:
    """Reads the options. With `secondary_tiers` vLLM reads those of its tiers and their manager.

    Args:
        config (Mapping[str, Any]): kv_connector_extra_config.

    Raises:
        ValueError: an option is unknown or missing, has an invalid value, or contradicts another.
    """
    has_tiers = bool(config.get("secondary_tiers"))
    for name in () if has_tiers else _OF_TIERS:
        if config.get(name):
            raise ValueError(
                f"kv_connector_extra_config: {name} is for vLLM's manager of secondary_tiers, and "
                f"there are none; leave {name} out"
            )
    for name in config:
        if name.startswith("kv_") or name == "engine_id":
            raise ValueError(
                f"kv_connector_extra_config has {name}; put it beside kv_connector_extra_config, "
                "in kv_transfer_config itself"
            )
        if name.startswith("spec_"):
            raise ValueError(
                f"kv_connector_extra_config has {name}, but KVSwapConnector makes its spec itself; "
                f"leave {name} out"
            )
    known = *_OURS, *_OF_VLLM, *_OF_TIERS
    for name in config.keys() - known:
        raise ValueError(
            f"kv_connector_extra_config has {name}, which KVSwapConnector does not know; "
            + did_you_mean(name, known)
        )
    given = {name: config[name] for name in _OURS if name in config}
    if given.get("host_server") is not None:
        _check_server(given)
        given["host_server"] = given["host_server"].removeprefix(SCHEME)
        given.pop("cpu_bytes_to_use", None)
    elif "cpu_bytes_to_use" not in config:
        raise ValueError("kv_connector_extra_config needs cpu_bytes_to_use, bytes of host memory")
    size = given.get("cpu_bytes_to_use")
    if isinstance(size, float) and 1 <= size < math.inf:
        # vLLM computes it from --kv-offloading-size, in GiB: 10.3 is no whole number of bytes.
        given["cpu_bytes_to_use"] = math.floor(size)
    for name, least in _LEAST.items():
        if name in given:
            given[name] = _whole(name, given[name], least)
    for name, none in _NOT_OF_TIERS.items() if has_tiers else ():
        if given.get(name, none) != none:
            raise ValueError(
                f"kv_connector_extra_config: {name} is {given[name]!r}, which vLLM's "
                f"secondary_tiers do not have; leave {name} out, or leave out secondary_tiers and "
                "use a host_server with a second tier (docs/serve.md)"
            )
    if has_tiers:
        given["eviction_policy"] = "lru"  # vLLM reads it, and may know others
    for name, choices in _CHOICES.items():
        if given.get(name, choices[0]) not in choices:
            raise _wrong(name, given[name], " or ".join(choices))
    if not isinstance(given.get("pin_in_background", False), bool):
        raise _wrong("pin_in_background", given["pin_in_background"], "true or false")
    return SpecOptions(**given)


def _check_server(given: Mapping[str, Any]) -> None:
    """Raises ValueError if host_server is no address, or an option is the server's."""
    server = given["host_server"]
    if not isinstance(server, str) or not server.startswith(SCHEME) or server == SCHEME:
        raise _wrong("host_server", server, f'"{SCHEME}PATH", the socket of a server')
    for name in _OF_SERVER:
        if name in given and given[name] != _OF_SERVER[name]:
            raise ValueError(
                f"kv_connector_extra_config: {name} is {given[name]!r}, but the server at "
                f"{server} has the host memory and its index; leave {name} out"
            )


def _whole(name: str, value: Any, least: int) -> int:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value != int(value) or value < least:
        raise _wrong(name, value, f"a whole number from {least} on")
    return int(value)


def _wrong(name: str, value: object, expected: str) -> ValueError:
    return ValueError(f"kv_connector_extra_config: {name} is {value!r}; it must be {expected}")
