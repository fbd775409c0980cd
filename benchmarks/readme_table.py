"""Prints the large table of the README from results/bandwidth-h200.json, or writes it there."""

from __future__ import annotations

import json
import re
import sys
from argparse import ArgumentParser
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("results") / "bandwidth-h200.json"
README = Path(__file__).parents[1] / "README.md"
TABLE = re.compile(r"^\| [^|\n]+: fragments per block \|.*(\n\|.*)*", re.MULTILINE)


def main(arguments: list[str]) -> int:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="to the README, over its table")
    options = parser.parse_args(arguments)
    table = markdown(json.loads(FILE.read_text()))
    if not options.write:
        print(table)
        return 0
    text, replaced = TABLE.subn(table, README.read_text())
    if replaced != 1:
        print(f"{README} has {replaced} such tables instead of one", file=sys.stderr)
        return 2
    README.write_text(text)
    return 0


def markdown(figures: Mapping[str, Any]) -> str:
    """Total time of a store / a load over that of one big copy: the medians, by blocks in a
    transfer. Of the arrangement that was measured first."""
    return "\n".join(_lines(figures))


def _lines(figures: Mapping[str, Any]) -> Iterator[str]:
    first = figures["settings"]["arrangements"][0]
    found: dict[tuple[str, str], dict[int, dict[str, float]]] = {}
    for cell in figures["cells"]:
        if cell["arrangement"] != first:
            continue
        for state, samples in cell["states"].items():
            name = f"{cell['shape']['layers']} x {cell['shape']['fragment_kib']} KiB"
            of_blocks = found.setdefault((name, state), {}).setdefault(cell["blocks"], {})
            _, median, _ = samples["total_us"]["over big copy"]["ours"]
            of_blocks[cell["direction"]] = median
    counts = list(dict.fromkeys(blocks for row in found.values() for blocks in row))
    headers = [f"{count} block{'s' * (count > 1)}" for count in counts]
    yield f"| {first}: fragments per block | {' | '.join(headers)} |"
    yield "|" + " --- |" * (1 + len(headers))
    for (name, state), row in found.items():
        texts = [f"{row[count]['store']:.2f} / {row[count]['load']:.2f}" for count in counts]
        yield f"| {name}{', cold' if state == 'cold' else ''} | {' | '.join(texts)} |"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
