"""Moves scattered blocks, beside one big copy of their bytes and beside what PyTorch needs for it.

Total time runs from the call of store() or load() until handler.synchronize() returns; that of the
big copy, pinned, from the call until the host sees its event. The reference R is one contiguous
copy by PyTorch with the guarantees of a transfer: an event on the current stream for which a copy
stream waits, an event, the copy, an event; then the host waits. "Plain ops" is the same transfer by
torch_kvswap/reference.py. All four in turn, in changing order. "Warm": nothing else runs. "Cold":
before each of them, host memory is read and PyTorch is called, as a server does.

Blocks and pages: other random ids, as lists, in every transfer. Without a GPU all copies are of
PyTorch, nothing is judged, and there are fewer and smaller shapes. All bytes are compared after
each cell. Ends with 1 when bytes are wrong, else with 0, whether or not the targets are met.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # a checkout need not be installed

from bandwidth_report import counts, judge_all, tables
from comparison import (
    COLD,
    PLAIN,
    WARM,
    Plan,
    add_comparison,
    finish_cells,
    measure_all,
    plain_ops,
)
from program import device_of, is_judged, new_parser
from transfers import blocks_of, shapes_of


def main(arguments: list[str]) -> int:
    options = _parser().parse_args(arguments)
    device = device_of(options)
    on_cuda = device.type == "cuda"
    plan = Plan(shapes_of(options, on_cuda), blocks_of(options, on_cuda), (WARM, COLD))
    cells = measure_all(plan, device, options, "bandwidth", {PLAIN: plain_ops})
    judged = is_judged(device)
    print(tables(cells, judged), "", *(counts(cells) if judged else ()), "", sep="\n")
    return finish_cells(options, "bandwidth", cells, judge_all(cells) if judged else [])


def _parser() -> ArgumentParser:
    parser = new_parser(__doc__)
    add_comparison(parser, samples=20, cold_samples=10)
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
