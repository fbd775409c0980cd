"""Draws the figures of bandwidth.py and interference.py from their JSON files, as PNG.

bandwidth: total time over that of one big copy, by blocks in a transfer, a line for each shape.
interference: what the compute loses for each GB moved, a bar for each way, with its spread. A
picture has the name of its JSON file. Needs matplotlib; ends with 2 when it is missing or a file
holds nothing that can be drawn, and then nothing is written.
"""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).with_name("results")
DIRECTIONS = ("store", "load")

Figures = Mapping[str, Any]  # what a JSON file holds
Line = tuple[list[int], list[float]]  # x and y
Bar = tuple[float, float, float]  # median, least and most


def main(arguments: list[str]) -> int:
    options = _parser().parse_args(arguments)
    try:
        import matplotlib
    except ImportError:
        print("plot.py draws with matplotlib; install it: pip install matplotlib", file=sys.stderr)
        return 2
    matplotlib.use("Agg")  # no screen
    contents = {file: json.loads(file.read_text()) for file in options.files or _drawable()}
    for file, figures in contents.items():
        if figures.get("benchmark") not in DRAWINGS:
            names = " or ".join(DRAWINGS)
            print(f"{file} is not of {names}, which are what can be drawn", file=sys.stderr)
            return 2
    for file, figures in contents.items():
        target = (options.out or file.parent) / file.with_suffix(".png").name
        target.parent.mkdir(parents=True, exist_ok=True)
        drawn = DRAWINGS[figures["benchmark"]](figures)
        drawn.savefig(target, dpi=110)
        print(target)
    return 0


def _parser() -> ArgumentParser:
    parser = ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("files", type=Path, nargs="*", help="JSON files; default: all that fit in results/")
    add("--out", type=Path, help="folder of the pictures; default: that of the JSON file")
    return parser


def _drawable() -> list[Path]:
    return sorted(path for name in DRAWINGS for path in RESULTS.glob(f"{name}-*.json"))


def shape_name(shape: Mapping[str, int]) -> str:
    return f"{shape['layers']} x {shape['fragment_kib']} KiB"


def lines(figures: Figures, direction: str) -> dict[str, Line]:
    """Blocks and ratios by shape."""
    found: dict[str, Line] = {}
    for cell in figures["cells"]:
        if cell["direction"] == direction:
            blocks, ratios = found.setdefault(shape_name(cell["shape"]), ([], []))
            blocks.append(cell["blocks"])
            ratios.append(cell["ratio"])
    return found


def bars(figures: Figures, direction: str, shape: str) -> dict[str, dict[str, Bar]]:
    """ms/GB by way and compute."""
    found: dict[str, dict[str, Bar]] = {}
    for cell in figures["cells"]:
        if (cell["direction"], shape_name(cell["shape"])) == (direction, shape):
            bar = (cell["lost_ms_per_gb"], *cell["lost_spread"])
            found.setdefault(cell["way"], {})[cell["compute"]] = bar
    return found


def _title(figures: Figures) -> str:
    machine = figures["machine"]
    return f"{machine['gpu'] or machine['cpu']}, torch {machine['torch']}, {machine['date']}"


def draw_bandwidth(figures: Figures) -> Any:
    from matplotlib import pyplot

    picture, axes = pyplot.subplots(1, 2, figsize=(11, 4.5), sharey=True, layout="constrained")
    for axis, direction in zip(axes, DIRECTIONS, strict=True):
        found = lines(figures, direction)
        for shape, (blocks, ratios) in found.items():
            axis.plot(blocks, ratios, marker="o", markersize=4, label=shape)
        counts = sorted({count for blocks, _ in found.values() for count in blocks})
        axis.set_xscale("log", base=2)
        axis.set_xticks(counts, [str(count) for count in counts])
        axis.axhline(1, color="black", linewidth=0.8)
        axis.grid(alpha=0.3)
        axis.set(title=direction, xlabel="blocks in a transfer")
    axes[0].set_ylabel("total time / one big copy")
    axes[1].legend(title="a block", fontsize="small")
    picture.suptitle(f"Scattered blocks beside one big pinned copy ({_title(figures)})")
    return picture


def draw_interference(figures: Figures) -> Any:
    from matplotlib import pyplot

    shapes = list(dict.fromkeys(shape_name(cell["shape"]) for cell in figures["cells"]))
    size = (12, 1 + 3 * len(shapes))
    picture, axes = pyplot.subplots(
        len(shapes), 2, figsize=size, sharey=True, squeeze=False, layout="constrained"
    )
    for row, shape in zip(axes, shapes, strict=True):
        for axis, direction in zip(row, DIRECTIONS, strict=True):
            _draw_bars(axis, bars(figures, direction, shape))
            axis.set_title(f"{direction}, {shape}")
        row[0].set_ylabel("compute lost, ms/GB")
    axes[0][1].legend(fontsize="small")
    picture.suptitle(f"What compute loses beside transfers ({_title(figures)})")
    return picture


def _draw_bars(axis: Any, found: Mapping[str, Mapping[str, Bar]]) -> None:
    computes = list(dict.fromkeys(compute for of_way in found.values() for compute in of_way))
    width = 0.8 / max(1, len(found))
    for number, (way, of_way) in enumerate(found.items()):
        places = [computes.index(compute) + number * width for compute in of_way]
        heights = [bar[0] for bar in of_way.values()]
        axis.bar(places, heights, width, yerr=_errors(list(of_way.values())), label=way)
    middle = (len(found) - 1) * width / 2
    axis.set_xticks([place + middle for place in range(len(computes))], computes)
    axis.axhline(0, color="black", linewidth=0.8)
    axis.grid(axis="y", alpha=0.3)


def _errors(of_way: Sequence[Bar]) -> list[list[float]]:
    """How far the least and the most are from the median."""
    return [[bar[0] - bar[1] for bar in of_way], [bar[2] - bar[0] for bar in of_way]]


DRAWINGS = {"bandwidth": draw_bandwidth, "interference": draw_interference}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
