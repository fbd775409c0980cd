"""Which devices the library drives itself."""

import torch


def is_native(device_type: str) -> bool:
    """Whether the library drives devices of this type itself: the CPU, and CUDA's GPUs.

    All others are driven through torch, also "cuda" in a PyTorch for ROCm: those are AMD's GPUs.
    """
    return device_type == "cpu" or (device_type == "cuda" and torch.version.hip is None)
