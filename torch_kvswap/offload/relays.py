"""Relays: other GPUs whose links take part in large transfers."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from torch_kvswap._native.arguments import kind_of, read_int
from torch_kvswap._native.loader import native
from torch_kvswap._native.log import log
from torch_kvswap.host_pool.system import one_at_a_time

LEAST_GAIN = 1.3  # times as fast as without it; less is not worth the peer's memory
_MAX_WAIT = 10.0  # seconds for other processes that measure


def usable_relays(device: torch.device, relays: Sequence[int]) -> list[int]:
    """Checks the relays, and measures each of them beside the device's own link.

    Logs a warning for each relay that is left out, with the reason.

    Args:
        device (torch.device): the cache's device.
        relays (Sequence[int]): indices of other GPUs.

    Returns:
        list[int]: the relays that speed up transfers.

    Raises:
        TypeError: an index is not an integer.
        ValueError: the device is no GPU, or a relay is the device itself or named twice.
    """
    if not isinstance(relays, Sequence) or isinstance(relays, str):
        raise TypeError(f"relays is {kind_of(relays)}; pass a list of GPU indices, such as [1]")
    usable = []
    for position, relay in enumerate(relays):
        name = f"relays[{position}]"
        peer = read_int(name, relay, 0)
        if device.type != "cuda":
            raise ValueError(
                f"{name} is {peer}, but the cache is on {device}, which has no link; leave it out"
            )
        if peer == device.index:
            raise ValueError(f"{name} is {peer}, the GPU of the cache; name other GPUs")
        if peer in relays[:position]:
            raise ValueError(f"{name} is {peer}, which is named twice")
        try:
            native.enable_peer_access(device.index, peer)
            gain = measured_gain(device.index, peer)
        except RuntimeError as error:
            log.warning("%s=%d is left out: %s", name, peer, error)
            continue
        if gain < LEAST_GAIN:
            log.warning(
                "%s=%d is left out: with it, transfers are only %.2f times as fast (%.2f is "
                "needed), as where two GPUs share a link",
                *(name, peer, gain, LEAST_GAIN),
            )
            continue
        usable.append(peer)
    return usable


@functools.cache
def measured_gain(own: int, peer: int) -> float:
    """How many times as fast transfers of GPU `own` are with this relay; measured once."""
    with one_at_a_time("sys", _MAX_WAIT):  # ranks start together
        return native.measure_relay(own, peer)
