"""Runs vLLM's own tests of its offloading manager on ours, and says what differs.

    python tools/vllm_suites.py FOLDER

FOLDER is vLLM's source distribution, unpacked, of the version that is installed in this Python.
Nothing is fetched. Each test runs with vLLM's class and with ours in its place. Exits with 1 if
one passes with vLLM's only, unless it looks for what is not in the interface that vLLM uses, or
EXPLAINED says why. Some tests have time limits: on a busy machine they may fail with either.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
SUITES = ("cpu/test_manager.py",)
# Why tests whose names have this in them end otherwise with ours.
_NUMBERS = "it expects the numbers of free pages in vLLM's order"
_RESET = "a request that runs through a reset stores nothing until it starts again (docs/vllm.md)"
EXPLAINED = {
    "test_already_stored_": _NUMBERS,
    "test_cpu_manager ": _NUMBERS,
    "reports_cache_usage_gauge": "it makes a cache of 0 chunks, which our spec refuses",
    "test_filter_reused_manager ": "it sets max_tracker_size, which our spec refuses",
    "test_lru_reset_discards_unfinished_request_recency": _RESET,
}
_INSIDE = "it looks into objects of vLLM"


def pytest_configure() -> None:
    """Puts our class in the place of vLLM's: this file is also a plugin of pytest."""
    from vllm.v1.kv_offload.cpu import manager as of_cpu

    from torch_kvswap.integrations.vllm.scheduler_side import KVSwapManager

    class Manager(KVSwapManager):
        def __init__(self, num_chunks: int, **how: Any) -> None:
            policy, threshold = how.get("cache_policy", "lru"), how.get("store_threshold", 0)
            info = how.get("info")
            labels = info and info.as_config_info()
            super().__init__(num_chunks, policy, threshold, how.get("enable_events", False), labels)

    of_cpu.CPUOffloadingManager = Manager


def run(folder: Path, *options: str) -> dict[str, tuple[str, str]]:
    """What failed, and the traceback, of each test that was not skipped."""
    suites = folder / "tests/v1/kv_offload"
    with tempfile.TemporaryDirectory() as made:
        report = Path(made) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "--import-mode=append", "-c", os.devnull]
        command += [f"--rootdir={suites}", f"--confcutdir={suites}", f"--junitxml={report}"]
        command += ["-p", "no:cacheprovider", *options]
        # vLLM comes from this Python, and its tests, by the import mode, from the folder.
        path = os.pathsep.join([str(ROOT), str(Path(__file__).parent)])
        ended = subprocess.run(
            [*command, *(str(suites / name) for name in SUITES)],
            cwd=made,
            env=os.environ | {"PYTHONPATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if ended.returncode not in (0, 1):  # 1: tests have failed
            sys.exit(f"pytest could not run vLLM's tests:\n{ended.stdout[-3000:]}")
        cases = list(ElementTree.parse(report).iter("testcase"))
    results = {}
    for case in cases:
        name = f"{case.get('classname', '').rpartition('kv_offload.')[2]}.{case.get('name')}"
        wrong = [*case.iter("failure"), *case.iter("error")]
        if wrong:
            results[name] = str(wrong[0].get("message")), wrong[0].text or ""
        elif case.find("skipped") is None:
            results[name] = "", ""
    return results


def explanation(name: str, problem: str, traceback: str) -> str:
    """Why a test does not pass with our classes; empty if it should."""
    *_, where = traceback.strip().splitlines() or [""]
    # Raised by the test, not by vLLM's code nor ours.
    if re.search(r"(tests/.*|monkeypatch)\.py:\d+: AttributeError", where) and re.search(
        r"(Manager|Primary).* has no attribute", problem
    ):
        return _INSIDE
    if ".touch(" in traceback:
        return "it calls touch(), which vLLM's scheduler does not call any more"
    known = [why for part, why in EXPLAINED.items() if part in f"{name} "]
    return known[0] if known else ""


def main() -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="vLLM's source distribution, unpacked")
    folder = parser.parse_args().folder.resolve()
    theirs, ours = run(folder), run(folder, "-p", "vllm_suites")
    passed = [name for name, (problem, _) in theirs.items() if not problem]
    failed = {name: ours.get(name, ("it did not run", "")) for name in passed}
    failed = {name: one for name, one in failed.items() if one[0]}
    version = importlib.metadata.version("vllm")
    print(f"vLLM {version}: {len(passed)} tests pass, with ours {len(passed) - len(failed)}")
    unexplained = 0
    for name, (problem, traceback) in failed.items():
        why = explanation(name, problem, traceback)
        unexplained += not why
        print(f"{name}: {why or 'UNEXPLAINED: ' + problem[:500]}")
    print(f"{unexplained} without an explanation")
    return int(unexplained > 0)


if __name__ == "__main__":
    sys.exit(main())
