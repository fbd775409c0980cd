"""Moves scattered blocks by what other libraries have installed here, beside torch_kvswap.

In turn, in one process, on the same blocks and pages: this library; the worker of vLLM's CPU
offloading; SGLang's transfer kernel; the copies of LMCache's server; the plain ops
(torch_kvswap/reference.py); and beside them one contiguous copy by PyTorch, which gathers nothing,
and one big copy, as in bandwidth.py, whose terms, shapes and states these are. A library takes part
if it can be imported and moves a few blocks right; the others are named, with the reason. Without a
GPU none does.

The tables have total times over that of the big copy; ! marks a way that moves the same blocks and
is more than 3 us faster than this library. All bytes are compared after each cell. Ends with 1 when
bytes are wrong, else with 0, whether or not one is faster.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # a checkout need not be installed

import torch
from comparison import (
    COLD,
    PLAIN,
    WARM,
    NewHandler,
    Plan,
    add_comparison,
    finish_cells,
    measure_all,
    plain_ops,
)
from peer_handlers import PEERS
from peers_report import judge, tables
from program import device_of, is_judged, new_parser
from transfers import DIRECTIONS, Shape, blocks_of, move, shapes_of


def main(arguments: list[str]) -> int:
    options = _parser().parse_args(arguments)
    device = device_of(options)
    on_cuda = device.type == "cuda"
    blocks = blocks_of(options, on_cuda)
    left_out = why_not(PEERS, device)
    found = {name: peer for name, peer in PEERS.items() if name not in left_out}
    versions = {name: peer.version() for name, peer in found.items()}
    shapes, states = shapes_of(options, on_cuda), (WARM, COLD)
    others: dict[str, NewHandler] = {**found, PLAIN: plain_ops}
    cells = measure_all(Plan(shapes, blocks, states), device, options, "peers", others)
    said = [f"{name}: {text}" for name, text in versions.items()]
    said += [f"left out: {name}: {reason}" for name, reason in left_out.items()]
    verdicts = judge(cells) if is_judged(device) else []
    print(tables(cells), "", *said, "", sep="\n")
    return finish_cells(options, "peers", cells, verdicts, versions=versions, left_out=left_out)


def _parser() -> ArgumentParser:
    parser = new_parser(__doc__)
    add_comparison(parser, samples=20, cold_samples=10)
    return parser


def why_not(peers: Mapping[str, NewHandler], device: torch.device) -> dict[str, str]:
    """Moves a few blocks by each, and returns why some cannot take part."""
    left_out = {}
    for name, peer in peers.items():
        blocks = Shape(2, 4).new_blocks(device, 20)
        with blocks.host:
            try:
                handler = peer(blocks)
                for direction in DIRECTIONS:
                    move(handler, blocks, (direction,), 9)
                if wrong := blocks.wrong():
                    left_out[name] = f"{wrong} blocks and pages had wrong bytes"
            except Exception as error:
                left_out[name] = f"{type(error).__name__}: {error}".partition("\n")[0]
    return left_out


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
