"""Prints the table of the README from results of peers.py, or writes it there."""

from __future__ import annotations

import json
import re
import sys
from argparse import ArgumentParser
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # a checkout need not be installed

from blocks import ONE_BY_ONE
from comparison import COLD, OURS, REFERENCE
from peer_handlers import PEERS
from report import Column, markdown_of
from transfers import DIRECTIONS

RESULTS = Path(__file__).with_name("results")
README = Path(__file__).parents[1] / "README.md"
TABLE = re.compile(r"^\| fragments per block \|.*(\n\|.*)*", re.MULTILINE)

# Of four shapes that are measured: the fragments of large models, and the hardest ones.
SHAPES = ("160 x 8 KiB", "160 x 2 KiB")
BLOCKS = (1, 64)

Row = tuple[str, int]  # shape and number of blocks


def main(arguments: list[str]) -> int:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="replace the table of the README")
    options = parser.parse_args(arguments)
    table = readme_table()
    if not options.write:
        print(table)
        return 0
    text, replaced = TABLE.subn(table, README.read_text())
    if replaced != 1:
        print(f"{README} has {replaced} such tables instead of one", file=sys.stderr)
        return 2
    README.write_text(text)
    return 0


def readme_table() -> str:
    return markdown(json.loads((RESULTS / "peers-h200.json").read_text()))


def markdown(figures: Mapping[str, Any]) -> str:
    """Total time of a store / a load over that of one big copy, cold: the medians. Of SHAPES and
    BLOCKS, with layers in separate allocations, as the README says."""
    ways = {"torch_kvswap": OURS, **{name: name for name in PEERS}, "plain PyTorch copy": REFERENCE}
    medians = {name: _medians(figures, way) for name, way in ways.items()}

    def column_of(name: str) -> Column[Row]:
        return Column(
            name,
            lambda row: " / ".join(medians[name][row][of] for of in DIRECTIONS),
        )

    columns: list[Column[Row]] = [
        Column("fragments per block", lambda row: row[0]),
        Column("blocks", lambda row: row[1]),
        *(column_of(name) for name, found in medians.items() if found),
    ]
    return markdown_of(columns, medians["torch_kvswap"])


def _medians(figures: Mapping[str, Any], way: str) -> dict[Row, dict[str, str]]:
    """By shape and number of blocks, then by direction."""
    found: dict[Row, dict[str, str]] = {}
    for cell in figures["cells"]:
        quartiles = cell["states"][COLD]["total_us"]["over big copy"]
        if cell["arrangement"] == ONE_BY_ONE and way in quartiles:
            shape = f"{cell['shape']['layers']} x {cell['shape']['fragment_kib']} KiB"
            if shape not in SHAPES or cell["blocks"] not in BLOCKS:
                continue
            both = found.setdefault((shape, cell["blocks"]), {})
            both[cell["direction"]] = f"{quartiles[way][1]:.2f}"
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
