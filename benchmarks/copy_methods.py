"""Compares the copy method that a handler chooses for scattered blocks with each forced method.

Total time is from the call of store() or load() until handler.synchronize() returns. Each round
copies once with each method, and beside them one big copy and the reference of bandwidth.py, in
changing order, warm and cold. "copy engines only" and "expedited" are options of a handler that
chooses. A forced method or an option that takes more than twice as long as the best in the first
rounds is left out of the others, and of the cold ones. All handlers share a cache and a pool, whose
bytes are compared after each cell. Without a GPU no method can be forced. The exit code is 1 if
bytes are wrong, else 0, whether targets are met or not.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # a checkout need not be installed

from big_copy import Before
from blocks import NumberedBlocks
from comparison import (
    COLD,
    WARM,
    Comparison,
    Plan,
    Timed,
    add_comparison,
    finish_cells,
    measure_kinds,
)
from copy_methods_report import COPY_ENGINES_ONLY, EXPEDITED, Cell, candidates, judge, tables
from program import device_of, is_judged, new_parser
from timing import Move
from transfers import Kind, blocks_of, move, shapes_of

from torch_kvswap import OffloadHandler
from torch_kvswap.copy_method import AUTO, CHOICES, COPY_ENGINES

STATES = (WARM, COLD)
# The handlers by copy_method, AUTO first. Then the reasons why other methods have no handler.
Methods = tuple[dict[str, OffloadHandler], dict[str, str]]
FORCED = [copy_method for copy_method in CHOICES if copy_method not in (AUTO, COPY_ENGINES)]


def main(arguments: list[str]) -> int:
    options = _parser().parse_args(arguments)
    device = device_of(options)
    on_cuda = device.type == "cuda"
    plan = Plan(shapes_of(options, on_cuda), blocks_of(options, on_cuda), STATES)
    cells = measure_kinds(plan, device, options, "copy methods", open_handlers, measure)
    verdicts = judge(cells) if is_judged(device) else []
    missed = [verdict for verdict in verdicts if verdict.met is False]
    print(tables(cells), "", *missed, "", sep="\n")
    return finish_cells(options, "copy_methods", cells, verdicts)


def _parser() -> ArgumentParser:
    parser = new_parser(__doc__)
    add_comparison(parser, samples=10, cold_samples=5)
    return parser


def open_handlers(blocks: NumberedBlocks, stack: ExitStack) -> Methods:
    ours, refused = {AUTO: OffloadHandler(blocks.layout, blocks.host, copy_method=AUTO)}, {}
    for copy_method in FORCED if blocks.device.type == "cuda" else ():
        try:
            ours[copy_method] = OffloadHandler(blocks.layout, blocks.host, copy_method=copy_method)
        except ValueError as error:
            refused[copy_method] = str(error)
    for handler in ours.values():
        stack.enter_context(handler)
    return ours, refused


def measure(comparison: Comparison, methods: Methods, blocks: NumberedBlocks, kind: Kind) -> Cell:
    def moved(handler: Any, before: Before, **options: Any) -> Move:
        return move(handler, blocks, kind.directions, kind.blocks, before, **options)

    ours, refused = methods
    cell = Cell(kind, refused=dict(refused))
    ways: dict[str, Timed] = {name: partial(moved, handler) for name, handler in ours.items()}
    if len(ours) > 1:  # the device has methods to choose from
        ways[COPY_ENGINES_ONLY] = partial(moved, ours[AUTO], copy_method=COPY_ENGINES)
    if len(ours) > 1 and kind.direction == "load":
        ways[EXPEDITED] = partial(moved, ours[AUTO], expedited=True)
    ways.update(comparison.copies(kind))
    for state in STATES:
        cell.states[state] = samples = comparison.run(ways, kind, state, candidates)
        ways = {name: ways[name] for name in samples.complete}
    cell.wrong = blocks.wrong()
    return cell


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
