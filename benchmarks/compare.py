"""Compares two runs of one program: what has changed by more than the spread.

    python benchmarks/compare.py before.json after.json

Prints the medians whose quartiles do not overlap. Exit code 2 if the files are of different
programs or machines, or have no quartiles in common.
"""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))  # a checkout need not be installed

from report import Column, markdown_of


class Change(NamedTuple):
    """A median that differs.

    Attributes:
        name (str): the cell and the figure.
        before, after (float): the medians.
    """

    name: str
    before: float
    after: float


def main(arguments: list[str]) -> int:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    options = parser.parse_args(arguments)
    before, after = (json.loads(path.read_text()) for path in (options.before, options.after))
    if before["benchmark"] != after["benchmark"]:
        print(
            f"different programs: {before['benchmark']} and {after['benchmark']}", file=sys.stderr
        )
        return 2
    for name in sorted((before["machine"].keys() | after["machine"].keys()) - {"date"}):
        pair = before["machine"].get(name), after["machine"].get(name)
        if pair[0] != pair[1]:
            print(f"different machines: {name} {pair[0]} and {pair[1]}", file=sys.stderr)
            return 2
    found, compared = changes(before, after)
    if not compared:
        print(f"the runs of {before['benchmark']} have no quartiles in common", file=sys.stderr)
        return 2
    columns: list[Column[Change]] = [
        Column("figure", lambda each: each.name),
        Column("before", lambda each: f"{each.before:g}"),
        Column("after", lambda each: f"{each.after:g}"),
        Column("after / before", lambda each: f"{each.after / each.before:.3f}"),
    ]
    if found:
        print(markdown_of(columns, found))
    print(f"{len(found)} of {compared} medians changed by more than the spread")
    return 0


def changes(before: Any, after: Any) -> tuple[list[Change], int]:
    """The medians that differ by more than the spread, and how many figures both runs have."""
    old, new = dict(_quartiles(before)), dict(_quartiles(after))
    both = [name for name in old if name in new]
    apart = [name for name in both if old[name][2] < new[name][0] or new[name][2] < old[name][0]]
    return [Change(name, old[name][1], new[name][1]) for name in apart if old[name][1]], len(both)


def _quartiles(value: Any, name: str = "") -> Iterator[tuple[str, list[float]]]:
    """Every figure with quartiles, by its place: of a cell of a list, by what identifies it."""
    if isinstance(value, dict):
        for key, below in value.items():
            yield from _quartiles(below, name if key in ("cells", "quartiles") else f"{name} {key}")
    elif isinstance(value, list):
        if len(value) == 3 and all(isinstance(number, int | float) for number in value):
            yield name.strip(), value
            return
        for below in value:
            if isinstance(below, dict):
                yield from _quartiles(below, f"{name} {_identity(below)}")


def _identity(cell: dict[str, Any]) -> str:
    """What says which cell it is: texts, whole numbers and the shape; counts of faults do not."""
    shape = " x ".join(map(str, cell.get("shape", {}).values()))
    names = [str(v) for k, v in cell.items() if isinstance(v, str | int) and k != "wrong"]
    return ", ".join([shape, *names] if shape else names)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
