import subprocess
import sys
from pathlib import Path

import pytest

from torch_kvswap.cli import doctor


def test_doctor_reports_every_topic_and_leaves_cuda_alone():
    program = (
        "import torch; from torch_kvswap.cli import doctor; print(doctor.main([]));"
        "assert not torch.cuda.is_initialized()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    topics = [line.partition(":")[0] for line in done.stdout.splitlines()]
    assert topics == [
        "library",
        "PyTorch",
        "CUDA driver",
        "GPUs",
        "CUDA kernels",
        "scattered copies",
        "path costs",
        "0",
    ]


def test_doctor_says_where_the_figures_of_each_kind_of_gpu_are_from(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("KVSWAP_PATH_COSTS", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(doctor, "_MODELS", tmp_path / "gpus")
    assert doctor.report()["path costs"] == "unknown: the system names no GPU"
    for number, model in enumerate(["Imaginary 9000", "Imaginary 9000", "Other GPU"]):
        folder = tmp_path / "gpus" / str(number)
        folder.mkdir(parents=True)
        (folder / "information").write_text(f"Model: \t\t {model}\nIRQ:   1\n")
    assert doctor.report()["path costs"] == (
        "path_costs.json, generic (Imaginary 9000), path_costs.json, generic (Other GPU)"
    )
    monkeypatch.setenv("KVSWAP_PATH_COSTS", "/nowhere")
    assert doctor.report()["path costs"].startswith("none: the costs of the paths cannot be read")
