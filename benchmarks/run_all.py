"""Run the benchmarks one after another, and say which targets were met.

`make bench` runs this. On a GPU it takes some minutes. Without one a reduced set runs, and the
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

BENCHMARKS = ("bandwidth", "submit_cost", "duplex", "interference", "copy_methods")
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
    with TemporaryDirectory() as temporary:
        folder = options.json or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        outcomes = [_run(name, folder / f"{name}.json") for name in options.only]
    print(summary(outcomes))
    return 1 if any(outcome.failed for outcome in outcomes) else 0


def _parser() -> ArgumentParser:
    parser = ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--json", type=Path, metavar="DIR", help="keep the figures there, NAME.json each")
    add("--only", nargs="+", choices=BENCHMARKS, default=BENCHMARKS, metavar="NAME")
    return parser


def _run(name: str, file: Path) -> Outcome:
    """In a process of its own: what it leaves behind on the GPU goes with it."""
    print(f"\n== {name}\n", flush=True)
    file.unlink(missing_ok=True)  # of an earlier run
    start = perf_counter()
    ended = subprocess.run([sys.executable, str(FOLDER / f"{name}.py"), "--json", str(file)])
    seconds = perf_counter() - start
    verdicts = json.loads(file.read_text())["verdicts"] if file.exists() else []
    missed = [verdict["name"] for verdict in verdicts if verdict["met"] is False]
    met = [verdict["met"] for verdict in verdicts]
    return Outcome(name, seconds, ended.returncode != 0, met, missed)


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
