"""Exchange: ranks that load the same pages, each a part of them over its own link."""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from torch_kvswap._native.loader import native
from torch_kvswap._native.log import log
from torch_kvswap.host_pool.memory import Mapping, Registration
from torch_kvswap.host_pool.pool import HostPool
from torch_kvswap.host_pool.shape import EXCHANGE_BYTES, read_part

if TYPE_CHECKING:
    from torch_kvswap.offload.native import NativeHandler

JOIN_TIMEOUT = 60.0  # seconds in which all ranks have to make their handlers
CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"  # hardware queues, which streams share
DEADLINE = 10.0  # seconds without any progress, after which a rank gives up a load


def read_exchange(
    exchange: object, device: torch.device, pools: Sequence[HostPool]
) -> tuple[int, int] | None:
    """Checks the argument `exchange` of a handler.

    Raises:
        TypeError: it is no tuple of two integers.
        ValueError: a number is out of range, or the device or a pool is not possible.
    """
    ranks = read_part(exchange, "exchange")
    if ranks is None:
        return None
    said = f"exchange is {exchange}"
    if not 2 <= ranks[1] <= native.MAX_EXCHANGE_RANKS:
        raise ValueError(f"{said}; 2 to {native.MAX_EXCHANGE_RANKS} ranks can exchange loads")
    if device.type != "cuda":
        raise ValueError(f"{said}, but the cache is on {device}, which has no link")
    if any(_file_of(pool) is None or pool.num_parts > 1 for pool in pools):
        raise ValueError(
            f"{said}, but other ranks cannot have the same pages; make the pool with "
            "HostPool(shared=True), without part, and attach() to it"
        )
    return ranks


def join_ranks(handler: NativeHandler, ranks: tuple[int, int]) -> None:
    """Lets a new handler exchange loads with other ranks. Logs a warning if that is not possible,
    and loads go by the own link."""
    if os.environ.get(CONNECTIONS) == "1":
        # A load that waits for other ranks would hold up a collective that they wait for.
        why: str | None = f"{CONNECTIONS} is 1, so all streams wait for each other; set it to 32"
    else:
        why = _join(handler, ranks)
    if why is not None:
        log.warning("exchange=%s is not used, and loads go by the own link: %s", ranks, why)


def _join(handler: NativeHandler, ranks: tuple[int, int]) -> str | None:
    """Why it is not possible, or None."""
    pools = handler.groups.pools
    mapping = pools[0]._memory.mapping
    assert isinstance(mapping, Mapping)
    first = mapping.nbytes - EXCHANGE_BYTES
    handler.shared = Registration(mapping, handler.device)
    try:
        why = handler.shared.add(first, mapping.nbytes)
        files = str([os.fstat(file).st_ino for pool in pools if (file := _file_of(pool))])
        place = mapping.address + first, *ranks, zlib.crc32(files.encode())
        return why or handler.join_exchange(*place, DEADLINE, JOIN_TIMEOUT)
    except NotImplementedError as error:
        return str(error)


def _file_of(pool: HostPool) -> int | None:
    return getattr(pool._memory.mapping, "fd", None)
