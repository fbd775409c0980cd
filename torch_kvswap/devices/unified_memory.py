"""Devices whose memory is the host's, where offloading frees nothing."""

import torch

from torch_kvswap._native.log import warn_once


def has_unified_memory(device: torch.device) -> bool:
    """Whether the device shares the host's memory, as Apple's and integrated GPUs do."""
    if device.type == "cuda" and torch.cuda.is_available():
        return bool(torch.cuda.get_device_properties(device).is_integrated)
    return device.type == "mps"


def warn_of_unified_memory(device: torch.device) -> None:
    """Logs a warning, once for each device, if it has no memory of its own."""
    if has_unified_memory(device):
        warn_once(
            f"{device} has no memory of its own: host pages take as much of the same memory as the "
            "blocks that they free; a larger cache does without copies (docs/devices.md)"
        )
