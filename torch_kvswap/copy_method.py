"""Which way blocks are copied: what the caller asks for, and the figures for the choice."""

from __future__ import annotations

import os

import torch

from torch_kvswap._native import abi
from torch_kvswap._native.arguments import read_int
from torch_kvswap.copy_method_costs import DIRECTIONS, Figures, read_figures
from torch_kvswap.metrics import PATHS

AUTO = "auto"
CHOICES = (AUTO, "batch", "strided", "staged", "kernel")
_UNKNOWN = -1.0  # seconds


def path_options(path: str | None, staging_bytes: int, device: torch.device) -> abi.PathOptions:
    """For a native handler. path: None is what KVSWAP_PATH says, or "auto". Raises ValueError for
    a path that there is not, and for figures that cannot be read."""
    name = "path" if path is not None else "KVSWAP_PATH"
    path = path if path is not None else os.environ.get("KVSWAP_PATH") or AUTO
    if path not in CHOICES:
        raise ValueError(f"{name}={path!r}; expected one of {', '.join(CHOICES)}")
    options = abi.PathOptions()
    options.path = -1 if path == AUTO else PATHS.index(path)
    options.staging_bytes = read_int("staging_bytes", staging_bytes)
    figures = None if device.type == "cpu" else figures_of(device)
    for direction, costs in zip(DIRECTIONS, options.costs, strict=True):
        for number, of_path in enumerate(PATHS):
            found = figures.costs[direction].get(of_path) if figures else None
            costs[number] = found.native() if found else abi.PathCosts(_UNKNOWN)
    return options


def figures_of(device: torch.device) -> Figures:
    return read_figures(torch.cuda.get_device_name(device) if torch.cuda.is_available() else "")
