"""The options of KVSwapLinker in `linker_extra_config`. SGLang is not imported here."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from torch_kvswap.encoding.slot import EncodingName, VerifyName

TESTED_VERSIONS = ("0.5.23",)


@dataclass(frozen=True)
class LinkerOptions:
    """The options in linker_extra_config.

    Attributes:
        host_bytes (int): host memory of each rank.
        encoding, verify: see HostPool.
        below (str | None): a second tier; see PrefixCache.
        server (str | None): the socket of a server that has the host memory of several engines;
            "{rank}" in it stands for the part of the model that this rank has.
    """

    host_bytes: int
    encoding: EncodingName = "raw"
    verify: VerifyName = "off"
    below: str | None = None
    server: str | None = None


def read_options(config: Mapping[str, Any]) -> LinkerOptions:
    """Reads linker_extra_config.

    Raises:
        ValueError: an option is unknown, missing or has a wrong type.
    """
    known = [field.name for field in fields(LinkerOptions)]
    if unknown := sorted(set(config) - set(known)):
        raise ValueError(
            f"linker_extra_config has {', '.join(unknown)}, which KVSwapLinker does not know; it "
            f"takes {', '.join(known)}"
        )
    size = config.get("host_bytes")
    if isinstance(size, bool) or not isinstance(size, int | float) or not 1 <= size < math.inf:
        raise ValueError(
            f"linker_extra_config: host_bytes is {size!r}; it must be the bytes of host memory of "
            "each rank"
        )
    for name in known[1:]:
        if not isinstance(config.get(name, ""), str):
            raise ValueError(
                f"linker_extra_config: {name} is {config[name]!r}; it must be a string"
            )
    if "below" in config and "server" in config:
        raise ValueError(
            "linker_extra_config has below and server; start the server with --below instead"
        )
    return LinkerOptions(**{**config, "host_bytes": int(size)})


def is_tested(version: str) -> bool:
    """Whether KVSwapLinker was tested with this version of SGLang."""
    return version.partition("+")[0] in TESTED_VERSIONS
