"""Run the benchmarks of a GPU one after another: `make bench`.

On a GPU it takes about as long as --seconds says: each program gets a share of them, and measures
fewer samples of what takes long. Without a GPU a reduced set runs, and checks the bytes only.
"""

from __future__ import annotations

import subprocess
import sys
from argparse import ArgumentParser
from pathlib import Path

# By benchmark: its share of the seconds.
SHARES = {
    "bandwidth": 0.28,
    "submit_cost": 0.16,
    "interference": 0.2,
    "copy_methods": 0.2,
    "encoding": 0.16,
}
START = 10.0  # seconds of each program until it measures: imports, CUDA, memory


def main() -> int:
    """Returns 1 if a benchmark failed or found wrong bytes."""
    parser = ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--json", type=Path, metavar="DIR", help="folder for the figures, a NAME.json each")
    add("--machine", metavar="NAME", help="part of these file names: bandwidth-NAME.json")
    add("--only", nargs="+", choices=SHARES, default=list(SHARES), metavar="NAME")
    text = "time for all programs; one takes longer if a few samples of each cell need it"
    add("--seconds", type=float, default=420.0, help=text)
    options = parser.parse_args()
    left = max(0.0, options.seconds - START * len(options.only))
    failed = []
    for name in options.only:
        print(f"\n== {name}\n", flush=True)
        seconds = left * SHARES[name] / sum(SHARES[each] for each in options.only)
        command = [sys.executable, str(Path(__file__).with_name(f"{name}.py"))]
        command += ["--time-limit", f"{seconds:.0f}"]
        if options.json:
            suffix = f"-{options.machine}" if options.machine else ""
            command += ["--json", str(options.json / f"{name}{suffix}.json")]
        # In a process of its own: what it leaves behind on the GPU goes with it.
        if subprocess.run(command).returncode != 0:
            failed.append(name)
    if failed:
        print(f"failed, or wrong bytes: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
