"""Runs vLLM's own tests of its offloading with our connector and manager, and says what differs.

    python tools/vllm_suites.py FOLDER

FOLDER is vLLM's source distribution, unpacked, of the version that is installed in this Python.
Nothing is fetched. Each test runs with vLLM's classes and with ours in their place. Exits with 1 if
one passes with vLLM's only and EXPLAINED does not say why.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

TOOLS = Path(__file__).resolve().parent
ROOT = TOOLS.parent
SUITES = "kv_offload/cpu/test_manager.py", "kv_connector/unit/offloading_connector"
# The model of these tests, which they would fetch.
MODEL = {"model_type": "opt", "architectures": ["OPTForCausalLM"], "torch_dtype": "float16"}
# Why tests with this in their names or tracebacks end otherwise with ours.
EXPLAINED = {
    r"(Manager|'function'|'method').* has no attribute": "it looks into vLLM's classes",
    r"\.touch\(": "it calls touch(), which vLLM's scheduler does not call any more",
    r"\.test_already_stored_|\.test_cpu_manager ": "it expects free pages in vLLM's order",
    r"reports_cache_usage_gauge ": "it makes a cache of 0 chunks, which our spec refuses",
    r"\.test_filter_reused_manager ": "it sets max_tracker_size, which our spec refuses",
    r"discards_unfinished_request_recency ": "a request that runs through a reset stores nothing "
    "until it starts again (docs/vllm.md)",
    r"\.test_small_hit_loads_synchronously": "our connector chooses sync_load_budget_bytes",
}


def pytest_load_initial_conftests() -> None:
    """Puts our classes in the place of vLLM's: this file is also a plugin of pytest."""
    from vllm.platforms import current_platform

    # Their tests use several groups of layers, which vLLM refuses without a GPU.
    type(current_platform).support_hybrid_kv_cache = classmethod(lambda cls: True)
    if not os.environ.get("KVSWAP_SUITES"):
        return
    from vllm.distributed.kv_transfer.kv_connector.v1 import offloading_connector
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading import common
    from vllm.v1.kv_offload.cpu import manager

    from torch_kvswap.integrations.vllm import connector
    from torch_kvswap.integrations.vllm.scheduler_side import KVSwapManager

    class Manager(KVSwapManager):
        def __init__(self, num_chunks: int, **how: Any) -> None:
            policy, threshold = how.get("cache_policy", "lru"), how.get("store_threshold", 0)
            info = how.get("info")
            labels = info and info.as_config_info()
            super().__init__(num_chunks, policy, threshold, how.get("enable_events", False), labels)

    class Scheduler(connector.SchedulerPart):
        def __init__(self, spec: Any, vllm_config: Any, kv_cache_config: Any) -> None:
            super().__init__(spec, vllm_config, kv_cache_config, loads_in_step=False)

    manager.CPUOffloadingManager = Manager
    offloading_connector.OffloadingConnectorScheduler = Scheduler
    offloading_connector.OffloadingConnectorWorker = connector.WorkerPart
    common.OffloadingWorkerMetadata = connector.KVSwapWorkerMetadata


def run(tests: Path, ours: str) -> dict[str, str]:
    """The traceback of each test that was not skipped; empty if it has passed."""
    with tempfile.TemporaryDirectory() as made:
        model = Path(made) / "facebook/opt-125m"
        model.mkdir(parents=True)
        (model / "config.json").write_text(json.dumps(MODEL))
        report = Path(made) / "report.xml"
        at = f"--rootdir={tests}", f"--confcutdir={tests}", f"--junitxml={report}"
        # vLLM comes from this Python, and its tests, by the import mode, from the folder.
        how = "-q", "--import-mode=append", "-c", os.devnull, "-p", "no:cacheprovider"
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *how, "-p", "vllm_suites", *at]
            + [str(tests / suite) for suite in SUITES],
            cwd=made,
            env=os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{TOOLS}", "KVSWAP_SUITES": ours},
            capture_output=True,
            text=True,
        )
        if done.returncode not in (0, 1):  # 1: tests have failed
            sys.exit(f"pytest could not run vLLM's tests:\n{done.stdout[-3000:]}{done.stderr}")
        cases = list(ElementTree.parse(report).iter("testcase"))
    results = {}
    for case in cases:
        name = f"{case.get('classname', '').rpartition('v1.')[2]}.{case.get('name')}"
        wrong = [*case.iter("failure"), *case.iter("error")]
        if wrong or case.find("skipped") is None:
            results[name] = "\n".join(f"{one.get('message')}\n{one.text}" for one in wrong)
    return results


def main() -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="vLLM's source distribution, unpacked")
    tests = parser.parse_args().folder.resolve() / "tests/v1"
    theirs, ours = run(tests, ""), run(tests, "ours")
    passed = [name for name, problem in theirs.items() if not problem]
    failed = {name: ours[name] for name in passed if ours[name]}
    version = importlib.metadata.version("vllm")
    print(f"vLLM {version}: {len(passed)} tests pass, with ours {len(passed) - len(failed)}")
    unexplained = 0
    for name, problem in failed.items():
        known = [why for part, why in EXPLAINED.items() if re.search(part, f"{name} {problem}")]
        unexplained += not known
        print(f"{name}: {known[0] if known else 'UNEXPLAINED: ' + problem[:500]}")
    print(f"{unexplained} without an explanation")
    return int(unexplained > 0)


if __name__ == "__main__":
    sys.exit(main())
