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
from torch_kvswap.copy_method import CopyMethodCosts, write_costs
from torch_kvswap.devices.kind import is_native

_SHOWN = (1 << 10, 4 << 10, 16 << 10, 64 << 10, 512 << 10)


def main(arguments: list[str]) -> int:
    """Runs the command and returns its exit code; 1 if it fails, 2 if there is no such GPU."""
    parser = argparse.ArgumentParser("python -m torch_kvswap calibrate", description=__doc__)
    parser.add_argument("--device", type=int, default=0, help="number of the GPU")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("there is no GPU to measure", file=sys.stderr)
        return 2
    if not is_native("cuda"):
        print("PyTorch copies on AMD's GPUs: there is nothing to measure", file=sys.stderr)
        return 2
    gpus = torch.cuda.device_count()
    if not 0 <= options.device < gpus:
        there = "the only one is 0" if gpus == 1 else f"there are 0 to {gpus - 1}"
        print(f"there is no GPU {options.device}; {there}", file=sys.stderr)
        return 2
    device = torch.device("cuda", options.device)
    gpu = torch.cuda.get_device_name(device)
    progress = Progress("measurements", STEPS, sys.stderr)
    machine = Machine(device)
    try:
        costs = calibrate(machine.measure, lambda: progress.advance(1))
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    finally:
        machine.close()
    for direction, of_direction in costs.items():
        print(_table(direction, of_direction))
    print(f"kept in {write_costs(gpu, costs)}")
    return 0


def _table(direction: str, of_direction: Mapping[str, CopyMethodCosts]) -> str:
    """A table of one direction's costs, one line per copy method."""
    columns = ("start, us", "block, us", "submit, us", "per copy, us")
    header = f"{direction:8}" + "".join(f"{column:>15}" for column in columns)
    lines = [header + "   fragments in GB/s:" + "".join(f"{size >> 10:>5} KiB" for size in _SHOWN)]
    for copy_method, costs in of_direction.items():
        seconds = (costs.start, costs.block, costs.submit_start, costs.submit_copy)
        rates = (size / max(costs.fragment_seconds(size), 1e-12) / 1e9 for size in _SHOWN)
        line = f"{copy_method:8}" + "".join(f"{1e6 * figure:15.2f}" for figure in seconds)
        lines.append(f"{line}{'':21}" + "".join(f"{rate:9.1f}" for rate in rates))
    return "\n".join(lines)
