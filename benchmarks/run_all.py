"""Run the benchmarks one after another, and say which targets were met.

`make bench` runs this. On a GPU it takes about as long as --seconds says: each program gets a share
of them, and measures fewer samples of what takes long. Without a GPU a reduced set runs, and the
targets of a GPU are not judged.
"""

from __future__ import annotations

import json
import subprocess
import sys
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

# By benchmark: its share of the seconds.
SHARES = {
    "bandwidth": 0.28,
    "submit_cost": 0.16,
    "interference": 0.2,
    "copy_methods": 0.2,
    "encoding": 0.16,
}
SECONDS = 420.0
START = 10.0  # seconds of each program until it measures: imports, CUDA, memory
FOLDER = Path(__file__).parent
SHOWN = 5  # missed targets of a benchmark


@dataclass(frozen=True)
class Outcome:
    """How a benchmark ended. met: of each of its targets, None where it could not be measured.
    missed: the names of those that are not."""

    name: str
    seconds: float
    failed: bool
    met: list[bool | None]
    missed: list[str]


def main(arguments: list[str] | None = None) -> int:
    """Returns 0 if all benchmarks ran, targets met or not, and 1 if one failed or found wrong
    bytes."""
    options = _parser().parse_args(arguments)
    suffix = f"-{options.machine}" if options.machine else ""
    with TemporaryDirectory() as temporary:
        folder = options.json or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        outcomes = [
            _run(name, folder / f"{name}{suffix}.json", seconds)
            for name, seconds in limits(options.only, options.seconds).items()
        ]
    print(summary(outcomes))
    return 1 if any(outcome.failed for outcome in outcomes) else 0


def _parser() -> ArgumentParser:
    parser = ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--json", type=Path, metavar="DIR", help="keep the figures there, NAME.json each")
    add("--machine", metavar="NAME", help="in the names of these files: bandwidth-NAME.json")
    add("--only", nargs="+", choices=SHARES, default=list(SHARES), metavar="NAME")
    text = "for all of them; a program takes longer where a few samples of each cell need it"
    add("--seconds", type=float, default=SECONDS, help=text)
    return parser


def limits(names: Sequence[str], seconds: float) -> dict[str, float]:
    """The time limit of each, without its start."""
    left = max(0.0, seconds - START * len(names))
    shares = sum(SHARES[name] for name in names)
    return {name: left * SHARES[name] / shares for name in names}


def _run(name: str, file: Path, seconds: float) -> Outcome:
    """In a process of its own: what it leaves behind on the GPU goes with it."""
    print(f"\n== {name}\n", flush=True)
    file.unlink(missing_ok=True)  # of an earlier run
    start = perf_counter()
    program = [sys.executable, str(FOLDER / f"{name}.py")]
    ended = subprocess.run([*program, "--json", str(file), "--time-limit", f"{seconds:.0f}"])
    took = perf_counter() - start
    verdicts = json.loads(file.read_text())["verdicts"] if file.exists() else []
    missed = [verdict["name"] for verdict in verdicts if verdict["met"] is False]
    met = [verdict["met"] for verdict in verdicts]
    return Outcome(name, took, ended.returncode != 0, met, missed)


def summary(outcomes: Sequence[Outcome]) -> str:
    return "\n".join(["", *_table(outcomes), *_missed(outcomes)])


def _table(outcomes: Sequence[Outcome]) -> Iterator[str]:
    yield f"{'benchmark':14}{'met':>6}{'missed':>8}{'not measured':>14}{'seconds':>9}"
    for outcome in outcomes:
        met, missed, unknown = (outcome.met.count(met) for met in (True, False, None))
        ending = "  FAILED, or wrong bytes: see above" if outcome.failed else ""
        yield f"{outcome.name:14}{met:6}{missed:8}{unknown:14}{outcome.seconds:9.1f}{ending}"


def _missed(outcomes: Sequence[Outcome]) -> Iterator[str]:
    for outcome in outcomes:
        for name in outcome.missed[:SHOWN]:
            yield f"missed: {name}"
        more = len(outcome.missed) - SHOWN
        if more > 0:
            yield f"missed: and {more} more of {outcome.name}"


if __name__ == "__main__":
    sys.exit(main())
