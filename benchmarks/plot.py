"""Draws the figures of bandwidth.py and interference.py from their JSON files, as PNG.

bandwidth: total time over that of one big copy, by blocks in a transfer, for each arrangement of
the layers, warm and cold: a line for each shape, a dashed one for the reference, which is one copy
by PyTorch, and crosses for the fastest peer. interference: what the compute loses for each GB
moved, a bar for each way, with its spread; and what peers.py has of others. A picture has the name
of its JSON file. Needs matplotlib; ends with 2 when it is missing or a file
holds nothing that can be drawn, and then nothing is written.
"""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from peers import BESIDE_COMPUTE, best_peer

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


def panels(figures: Figures) -> list[tuple[str, str]]:
    """Arrangements and states."""
    return list(
        dict.fromkeys(
            (cell["arrangement"], state) for cell in figures["cells"] for state in cell["states"]
        )
    )


def lines(
    figures: Figures, arrangement: str, state: str, direction: str, way: str
) -> dict[str, Line]:
    """Blocks and ratios by shape, of what was measured."""
    found: dict[str, Line] = {}
    for cell in figures["cells"]:
        if (cell["arrangement"], cell["direction"]) != (arrangement, direction):
            continue
        ratios = cell["states"][state]["total_us"]["over big copy"]
        if way in ratios:
            _add(found, cell, ratios[way][1])
    return found


def peer_points(figures: Figures, arrangement: str, state: str, direction: str) -> dict[str, Line]:
    """Blocks and ratios of the fastest peers by shape."""
    found: dict[str, Line] = {}
    for cell in figures["cells"]:
        if (cell["arrangement"], cell["direction"]) == (arrangement, direction):
            shape, blocks = cell["shape"], cell["blocks"]
            if peer := best_peer(**shape, direction=direction, blocks=blocks, state=state):
                _add(found, cell, peer.ratio)
    return found


def _add(found: dict[str, Line], cell: Mapping[str, Any], ratio: float) -> None:
    blocks, ratios = found.setdefault(shape_name(cell["shape"]), ([], []))
    blocks.append(cell["blocks"])
    ratios.append(ratio)


def bars(
    figures: Figures, arrangement: str, direction: str, shape: str
) -> dict[str, dict[str, Bar]]:
    """ms/GB by way and compute, of peers where there are figures."""
    found: dict[str, dict[str, Bar]] = {}
    for cell in figures["cells"]:
        kind = cell["arrangement"], cell["direction"], shape_name(cell["shape"])
        if kind == (arrangement, direction, shape):
            bar = (cell["lost_ms_per_gb"], *cell["lost_spread"])
            found.setdefault(cell["way"], {})[cell["compute"]] = bar
    for peer in BESIDE_COMPUTE if shape == "160 x 8 KiB" else ():
        if peer.direction == direction:
            lost = peer.lost_ms_per_gb
            found[peer.name] = {"decode": (lost, lost, lost)}
    return found


def _title(figures: Figures) -> str:
    machine = figures["machine"]
    return f"{machine['gpu'] or machine['cpu']}, torch {machine['torch']}, {machine['date']}"


def draw_bandwidth(figures: Figures) -> Any:
    from matplotlib import pyplot

    rows = panels(figures)
    size = (12, 1 + 3.5 * len(rows))
    picture, axes = pyplot.subplots(
        len(rows), 2, figsize=size, sharey=True, squeeze=False, layout="constrained"
    )
    for row, (arrangement, state) in zip(axes, rows, strict=True):
        for axis, direction in zip(row, DIRECTIONS, strict=True):
            _draw_lines(axis, figures, arrangement, state, direction)
            axis.set(title=f"{direction}, {arrangement}, {state}", xlabel="blocks in a transfer")
        row[0].set_ylabel("total time / one big copy")
    axes[0][1].legend(
        title="a block\n--: R, x: peers", fontsize="small", loc="upper left", bbox_to_anchor=(1, 1)
    )
    picture.suptitle(f"Scattered blocks beside one big pinned copy ({_title(figures)})")
    return picture


def _draw_lines(axis: Any, figures: Figures, arrangement: str, state: str, direction: str) -> None:
    ours = lines(figures, arrangement, state, direction, "ours")
    reference = lines(figures, arrangement, state, direction, "reference")
    peers = peer_points(figures, arrangement, state, direction)
    for number, (shape, line) in enumerate(ours.items()):
        color = f"C{number}"
        axis.plot(*line, marker="o", markersize=4, label=shape, color=color)
        axis.plot(*reference.get(shape, ((), ())), linestyle="--", linewidth=0.8, color=color)
        axis.plot(*peers.get(shape, ((), ())), linestyle="", marker="x", color=color)
    counts = sorted({count for blocks, _ in ours.values() for count in blocks})
    axis.set_xscale("log", base=2)
    axis.set_xticks(counts, [str(count) for count in counts])
    axis.axhline(1, color="black", linewidth=0.8)
    axis.grid(alpha=0.3)


def draw_interference(figures: Figures) -> Any:
    from matplotlib import pyplot

    rows = list(
        dict.fromkeys((cell["arrangement"], shape_name(cell["shape"])) for cell in figures["cells"])
    )
    size = (13, 1 + 3 * len(rows))
    picture, axes = pyplot.subplots(
        len(rows), 2, figsize=size, sharey=True, squeeze=False, layout="constrained"
    )
    for row, (arrangement, shape) in zip(axes, rows, strict=True):
        for axis, direction in zip(row, DIRECTIONS, strict=True):
            _draw_bars(axis, bars(figures, arrangement, direction, shape))
            axis.set_title(f"{direction}, {shape}, {arrangement}")
        row[0].set_ylabel("compute lost, ms/GB")
    axes[0][1].legend(fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))
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
