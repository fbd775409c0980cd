"""Runs the tests and says which lines and branches of Python and C++ they reach.

    python tools/measure_coverage.py [pytest's arguments]

All is in build/coverage, a copy of the checkout with a library that counts. Processes that the
tests start are counted too, unless they are killed. Prints a table by folders. The lines themselves
are in build/coverage/report: python/index.html, native/index.html, and the same as JSON.

Branches that C++ only takes when something throws are not counted: nearly every call has one.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

from instrumented import ROOT, build_library, make_copy, names_tests, say

COPY = ROOT / "build" / "coverage"
OBJECTS = COPY / "objects"  # beside each is what it has counted
REPORT = COPY / "report"
GCOV = COPY / "tests" / "support" / "gcov"
FLAGS = "--coverage -fprofile-update=atomic -O0"  # threads count; -O0 merges no lines
READ_BY_TESTS = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "docs", "tools")
# They read the checkout, build wheels or look at the library's symbols.
LEFT_OUT = ("architecture", "binary", "build_wheel", "environment", "sanitize", "setup")
COVERAGE = [sys.executable, "-m", "coverage"]


class Count(NamedTuple):
    """Of a file or a folder."""

    lines: int
    reached_lines: int
    branches: int
    reached_branches: int

    def plus(self, other: Count) -> Count:
        return Count(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))


def compile_counters() -> Path:
    """The object with which `GCOV`/sitecustomize.py makes the library write its counters."""
    cxx = shlex.split(os.environ.get("CXX", "")) or ["g++"]
    source, made = GCOV / "write_counters.cpp", COPY / "write_counters.o"
    subprocess.run([*cxx, "-fPIC", "-c", str(source), "-o", str(made)], check=True)
    return made


def run_tests(arguments: list[str]) -> int:
    path = [str(GCOV), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "KVSWAP_TEST_TIMEOUT_SCALE": "5",
    }
    command = [*COVERAGE, "run", f"--source={COPY / 'torch_kvswap'}", "-m", "pytest"]
    if not names_tests(arguments):
        arguments = [f"--ignore-glob=*/test_{name}.py" for name in LEFT_OUT] + arguments
    return subprocess.run([*command, "-n2", *arguments], env=environment, cwd=COPY).returncode


def count_python() -> dict[str, Count]:
    """By files; writes the report."""
    subprocess.run([*COVERAGE, "combine", "--quiet"], cwd=COPY, check=True)
    subprocess.run(
        [*COVERAGE, "html", "--quiet", "-d", str(REPORT / "python")], cwd=COPY, check=True
    )
    file = REPORT / "python.json"
    subprocess.run([*COVERAGE, "json", "--quiet", "-o", str(file)], cwd=COPY, check=True)
    return read_python(json.loads(file.read_text()))


def read_python(report: dict[str, Any]) -> dict[str, Count]:
    """The counts in a report of coverage.py, by files. It knows no branches if no test has imported
    the package."""
    counts = {}
    for name, of_file in report["files"].items():
        found = of_file["summary"]
        counts[name] = Count(
            found["num_statements"],
            found["covered_lines"],
            found.get("num_branches", 0),
            found.get("covered_branches", 0),
        )
    return counts


def count_native() -> dict[str, Count]:
    """By files; writes the report."""
    (REPORT / "native").mkdir(parents=True)
    file = REPORT / "native.json"
    command = [sys.executable, "-m", "gcovr", "--root", str(ROOT), "--filter", "csrc/"]
    command += ["--exclude-throw-branches", "--exclude-unreachable-branches"]
    command += ["--gcov-suspicious-hits-threshold", "0"]  # the codec's loops turn 2^32 times
    command += ["--json-summary", str(file), "--html-details", str(REPORT / "native/index.html")]
    subprocess.run([*command, str(OBJECTS)], cwd=ROOT, check=True)
    counts = {}
    for found in json.loads(file.read_text())["files"]:
        counts[found["filename"]] = Count(
            found["line_total"],
            found["line_covered"],
            found["branch_total"],
            found["branch_covered"],
        )
    return counts


def percent(reached: int, all_of_them: int) -> str:
    return f"{100 * reached / all_of_them:.1f}" if all_of_them else "-"


def make_table(counts: dict[str, Count]) -> str:
    """The table of the counts of files by their folders."""
    folders: dict[str, Count] = defaultdict(lambda: Count(0, 0, 0, 0))
    for name, count in counts.items():
        folder = str(Path(name).parent)
        folders[folder] = folders[folder].plus(count)
    rows = [("folder", "lines", "%", "branches", "%")]
    for folder, count in sorted(folders.items()):
        lines = percent(count.reached_lines, count.lines)
        branches = percent(count.reached_branches, count.branches)
        rows.append((folder, str(count.lines), lines, str(count.branches), branches))
    return "\n".join(
        f"{folder:30}{lines:>7}{reached:>7}{branches:>10}{taken:>7}"
        for folder, lines, reached, branches, taken in rows
    )


def main(arguments: list[str]) -> int:
    make_copy(COPY, READ_BY_TESTS)
    for old in (OBJECTS, REPORT):
        shutil.rmtree(old, ignore_errors=True)
    flags = {"CXXFLAGS": FLAGS, "LDFLAGS": f"--coverage {compile_counters()}"}
    build_library(COPY, flags)
    subprocess.run([*COVERAGE, "erase"], cwd=COPY, check=True)
    status = run_tests(arguments)
    say(f"writing {REPORT}")
    print(make_table(count_native() | count_python()))
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
