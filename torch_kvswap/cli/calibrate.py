"""Measure the copy methods on this machine, and keep the result for all processes of this user.

Takes some seconds on a GPU, which should be otherwise idle. Without a measurement, the shipped
costs for this GPU are used, or those of an H200.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping

import torch

from torch_kvswap.calibrate import STEPS, Machine, calibrate
from torch_kvswap.cli.progress import Progress
from torch_kvswap.copy_method import CopyMethodCosts, cache_file, write_figures

_SHOWN = (1 << 10, 4 << 10, 16 << 10, 64 << 10, 512 << 10)


def main(arguments: list[str]) -> int:
    """Runs the command and returns its exit code; 2 if there is no GPU."""
    parser = argparse.ArgumentParser("python -m torch_kvswap calibrate", description=__doc__)
    parser.add_argument("--device", type=int, default=0, help="number of the GPU")
    parser.add_argument("--forget", action="store_true", help="remove what was measured before")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("there is no GPU: nothing to choose between", file=sys.stderr)
        return 2
    device = torch.device("cuda", options.device)
    gpu = torch.cuda.get_device_name(device)
    if options.forget:
        cache_file(gpu).unlink(missing_ok=True)
        return 0
    progress = Progress("measurements", STEPS, True, sys.stderr)
    machine = Machine(device)
    try:
        costs = calibrate(machine.seconds, lambda: progress.advance(1))
    finally:
        machine.close()
    for direction, of_direction in costs.items():
        print(_table(direction, of_direction))
    print(f"kept in {write_figures(gpu, costs)}")
    return 0


def _table(direction: str, costs: Mapping[str, CopyMethodCosts]) -> str:
    """A table of one direction's costs, one line per copy method."""
    sizes = [f"{size >> 10} KiB" for size in _SHOWN]
    lines = [f"{direction:8}{'start, us':>11}{'block, us':>11}   fragments in GB/s:{'':2}"]
    lines[0] += "".join(f"{size:>9}" for size in sizes)
    for copy_method, of_method in costs.items():
        rates = (size / max(of_method.fragment_seconds(size), 1e-12) / 1e9 for size in _SHOWN)
        figures = f"{of_method.start * 1e6:11.1f}{of_method.block * 1e6:11.2f}"
        lines.append(f"{copy_method:8}{figures}{'':23}" + "".join(f"{rate:9.1f}" for rate in rates))
    return "\n".join(lines)
