"""Controls: faults made on purpose, which the sanitizer must report.

tools/sanitize.py runs them first. The faults are in the package's own library, in processes that
are started like those of all tests.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import simulated_driver
from simulated_driver import Driver, simulated

from torch_kvswap._native.loader import native

TSAN = "libtsan" in os.environ["LD_PRELOAD"]
only_tsan = pytest.mark.skipif(not TSAN, reason="AddressSanitizer does not look for it")
only_asan = pytest.mark.skipif(TSAN, reason="ThreadSanitizer does not look for it")


def report_of(fault: str, folder: Path) -> str:
    """What the sanitizer reports of a program, which it has to end."""
    variables = dict(os.environ)
    for name in ("TSAN_OPTIONS", "ASAN_OPTIONS"):
        if name in variables:
            variables[name] += f":log_path={folder / 'report'}"
    before = "import ctypes, threading, time\nimport numpy, torch\nimport torch_kvswap\n"
    done = subprocess.run(
        [sys.executable, "-c", before + textwrap.dedent(fault)],
        env=variables,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode != 0, "nobody ended the process"
    return done.stderr + "".join(file.read_text() for file in folder.iterdir())


def is_instrumented(library: Path) -> bool:
    return (b"__tsan_func_entry" if TSAN else b"__asan_init") in library.read_bytes()


def test_library_and_driver_are_compiled_for_it() -> None:
    assert is_instrumented(Path(native.__file__))
    assert [
        file.name for file in simulated_driver.build().iterdir() if not is_instrumented(file)
    ] == []


@simulated
def test_started_processes_have_the_same_library(driver: Driver) -> None:
    from torch_kvswap._native.loader import native

    assert Path(os.environ["SIMULATED_DRIVER"]).name in Path("/proc/self/maps").read_text()
    assert is_instrumented(Path(native.__file__))
    assert "libtsan" in os.environ["LD_PRELOAD"] or "libasan" in os.environ["LD_PRELOAD"]


@only_tsan
def test_a_data_race_is_reported(tmp_path: Path) -> None:
    fault = """
    ids, out = torch.arange(1000), torch.empty(4000, dtype=torch.int64)
    end = time.monotonic() + 60
    def write():
        while time.monotonic() < end:
            torch_kvswap.expand_block_ids(ids, 4, out=out)
    threads = [threading.Thread(target=write) for _ in range(2)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    """
    report = report_of(fault, tmp_path)
    assert "data race" in report
    assert "expand_block_ids.cpp" in report


@only_asan
def test_a_read_past_the_end_is_reported(tmp_path: Path) -> None:
    fault = """
    seven = numpy.zeros(7, numpy.int64)
    eight = (ctypes.c_int64 * 8).from_address(seven.ctypes.data)
    torch_kvswap.expand_block_ids(torch.from_numpy(numpy.ctypeslib.as_array(eight)), 1)
    """
    report = report_of(fault, tmp_path)
    assert "heap-buffer-overflow" in report
    assert "expand_block_ids.cpp" in report
