"""Runs tests with the native library and the simulated driver compiled for a sanitizer of g++.

    python tools/sanitize.py tsan|asan [pytest's arguments]

tsan finds data races, and orders of locks that can deadlock. asan finds what is read or written
outside of its memory or after its end, and with UBSan undefined behaviour. Python and torch are not
compiled for it. The sanitizer is preloaded: it sees what they allocate and which locks they take.

All is in a copy of the checkout, build/tsan or build/asan, with a library of its own. The first
report ends its process, and stays in the folder `reports` of the copy. A test during which one
appears fails, whoever started the process. UBSan writes to stderr instead.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
COPIED = (
    *("benchmarks", "conftest.py", "csrc", "examples", "pyproject.toml"),
    *("tests", "torch_kvswap"),
)
SUPPRESSIONS = ROOT / "tests" / "support" / "sanitizers" / "tsan.supp"


class Sanitizer(NamedTuple):
    flags: str
    runtime: tuple[str, ...]  # what is preloaded
    environment: dict[str, str]


SANITIZERS = {
    "tsan": Sanitizer(
        flags="-fsanitize=thread",
        runtime=("libtsan.so",),
        environment={
            # Tests fork while threads run, and their children start others.
            "TSAN_OPTIONS": f"suppressions={SUPPRESSIONS}:second_deadlock_stack=1:"
            "die_after_fork=0:halt_on_error=1",
        },
    ),
    "asan": Sanitizer(
        flags="-fsanitize=address,undefined,float-cast-overflow -fno-sanitize-recover=all",
        # libasan looks for the function that throws as soon as it is loaded, and Python has none.
        runtime=("libasan.so", "libstdc++.so.6"),
        environment={
            # Python and torch keep memory until the process ends: that is not told from a leak.
            # What handlers and managers must give back, tests count.
            "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=1:strict_init_order=1",
            "UBSAN_OPTIONS": "print_stacktrace=1",
            "PYTHONMALLOC": "malloc",  # each object's end is seen, and not only that of a page
        },
    ),
}
TESTS = (
    *("test_handler*.py", "test_scheduler.py", "test_job_table.py"),
    *("test_failures.py", "test_channel.py", "test_pinning.py", "test_fuzz*.py", "test_relay*.py"),
    *("test_prefix_cache.py", "test_manager.py", "test_manager_states.py", "test_eviction.py"),
    *("test_tier_*.py", "test_server*.py"),
    *("test_encoded*.py", "test_codec.py", "test_verified*.py", "test_checksums.py"),
)
# Tests that a sanitizer cannot run. Each begins with why.
LEFT_OUT = {
    "tsan": [
        # It counts how often threads wake up, and the sanitizer has one of its own.
        "sim/test_scheduler.py::test_an_idle_handler_wakes_nobody",
    ],
    "asan": [],
}


def make_copy(copy: Path) -> None:
    """Copies what tests need, except for the library. What else is there stays, such as the
    simulated driver."""
    copy.mkdir(parents=True, exist_ok=True)
    for name in COPIED:
        source, target = ROOT / name, copy / name
        if source.is_file():
            shutil.copy2(source, target)
        else:
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.so", "__pycache__"))


def build_library(copy: Path, flags: dict[str, str]) -> None:
    """Builds the library into the copy, with these flags, which setup.py reads."""
    command = [sys.executable, "setup.py", "--quiet", "build_ext", "--build-lib", str(copy)]
    command += ["--build-temp", str(copy / "objects")]  # beside those of the ordinary build
    subprocess.run(command, cwd=ROOT, env=os.environ | flags, stdout=sys.stderr, check=True)


def find_runtime(names: tuple[str, ...]) -> str:
    """The files of g++ to preload."""
    cxx = shlex.split(os.environ.get("CXX", "")) or ["g++"]
    found = []
    for name in names:
        command = [*cxx, f"-print-file-name={name}"]
        file = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        if not Path(file).is_absolute():
            raise SystemExit(
                f"torch_kvswap: {shlex.join(cxx)} has no {name}. Install g++ with its sanitizers; "
                "on Fedora and its like they are the packages libtsan, libasan and libubsan."
            )
        found.append(file)
    return ":".join(found)


def find_starter(environment: dict[str, str]) -> list[str]:
    """What to start Python with: a command that turns random addresses off, where that is allowed.
    With many random bits, parts of a process are where the sanitizer has its own memory."""
    starters: list[list[str]] = [["setarch", "-R"]] if shutil.which("setarch") else []
    for starter in [*starters, []]:
        command = [*starter, sys.executable, "-c", ""]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode == 0:
            return starter
    raise SystemExit(
        f"torch_kvswap: Python does not start with {environment['LD_PRELOAD']}. If it complains of "
        f"the memory mapping, allow `setarch -R` or `sysctl vm.mmap_rnd_bits=28`.\n{done.stderr}"
    )


def find_tests(arguments: list[str]) -> list[str]:
    """pytest's arguments, with all of TESTS if they name none."""
    if any((ROOT / argument.partition("::")[0]).exists() for argument in arguments):
        return arguments
    files = {path for pattern in TESTS for path in (ROOT / "tests").rglob(pattern)}
    names = [str(path.relative_to(ROOT)) for path in sorted(files)]
    return ["tests/support/sanitizers/controls.py", *names, *arguments]


def main(name: str, arguments: list[str]) -> int:
    sanitizer, copy = SANITIZERS[name], ROOT / "build" / name
    preload = find_runtime(sanitizer.runtime)
    make_copy(copy)
    flags = {
        "CXXFLAGS": f"{sanitizer.flags} -O1 -g1 -fno-omit-frame-pointer",
        "LDFLAGS": sanitizer.flags,
    }
    build_library(copy, flags)
    reports = copy / "reports"
    shutil.rmtree(reports, ignore_errors=True)
    reports.mkdir()
    # Tests compile the simulated driver with the flags, too.
    environment = os.environ | flags | sanitizer.environment
    for variable in ("TSAN_OPTIONS", "ASAN_OPTIONS"):  # UBSan beside ASan knows no files
        if variable in sanitizer.environment:
            environment[variable] += f":log_path={reports / 'report'}"
    environment |= {
        "LD_PRELOAD": preload,
        "PYTHONPATH": str(copy / "tests" / "support" / "sanitizers"),
        "KVSWAP_REPORTS": str(reports),
        "KVSWAP_TEST_TIMEOUT_SCALE": "5",
        "OMP_NUM_THREADS": "1",  # how libgomp's threads wait for each other is not seen
    }
    starter = find_starter(environment)
    # What ends pytest's own process is to be seen on stderr.
    options = ["-n2", "--capture=sys", "-p", "no_reports"]
    options += [f"--deselect=tests/{test}" for test in LEFT_OUT[name]]
    command = [*starter, sys.executable, "-m", "pytest", *options, *find_tests(arguments)]
    return subprocess.run(command, env=environment, cwd=copy).returncode


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] not in SANITIZERS:
        raise SystemExit(__doc__)
    sys.exit(main(sys.argv[1], sys.argv[2:]))
