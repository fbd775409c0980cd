"""Stores and loads at once through one handler, beside two big copies at once.

"total": from the first call until the host sees the end of both; a big copy each way at once
likewise, and so the reference R: what PyTorch needs for two contiguous copies with the guarantees
of two transfers. All in turn, warm and cold, as in bandwidth.py. "link": everything is given to a
GPU whose stream is held, and timed there from the end of the hold on, so that the host costs
nothing. Without a GPU there is no "link", the copies run one after the other, and nothing is
judged. All bytes are compared after each cell. Ends with 1 when bytes are wrong, else with 0,
whether or not the target is met.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # a checkout need not be installed

from comparison import COLD, WARM, Plan, add_comparison, measure_all, settings
from comparison_report import judge, no_targets, tables
from duplex_report import targets
from program import device_of, finish, is_judged, new_parser
from transfers import BOTH, shapes_of


def main(arguments: list[str]) -> int:
    options = _parser().parse_args(arguments)
    device = device_of(options)
    on_cuda = device.type == "cuda"
    blocks = options.blocks or ([64, 512] if on_cuda else [8])
    plan = Plan(shapes_of(options, on_cuda), [BOTH], blocks, (WARM, COLD), links=True)
    cells = measure_all(plan, device, options, "duplex")
    judged = targets if is_judged(device) else no_targets
    verdicts = judge(cells, judged)
    print(tables(cells, judged), "", *verdicts, sep="\n")
    content = {
        "benchmark": "duplex",
        "settings": settings(options),
        "cells": [cell.to_json() for cell in cells],
    }
    return finish(options, content, verdicts, sum(cell.wrong for cell in cells))


def _parser() -> ArgumentParser:
    parser = new_parser(__doc__)
    add_comparison(parser, samples=20, cold_samples=10)
    parser.add_argument("--blocks", type=int, nargs="+", help="in each of the two transfers")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
