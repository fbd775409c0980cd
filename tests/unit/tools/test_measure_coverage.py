"""tools/measure_coverage.py reads what coverage.py reports."""

import importlib
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture
def measure_coverage(monkeypatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    return importlib.import_module("measure_coverage")


def test_a_report_of_tests_that_import_nothing_of_the_package_has_no_branches(measure_coverage):
    lines = {"covered_lines": 0, "num_statements": 4}
    branches = {"num_branches": 2, "covered_branches": 1}
    report = {
        "files": {
            "torch_kvswap/ops.py": {"summary": lines},
            "torch_kvswap/cli/doctor.py": {"summary": lines | branches},
        }
    }
    counts = measure_coverage.read_python(report)
    assert counts == {
        "torch_kvswap/ops.py": (4, 0, 0, 0),
        "torch_kvswap/cli/doctor.py": (4, 0, 2, 1),
    }
    assert measure_coverage.make_table(counts).splitlines()[1].split() == [
        *("torch_kvswap", "4", "0.0", "0", "-")
    ]
