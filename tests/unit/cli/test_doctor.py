import subprocess
import sys
from pathlib import Path

import pytest
from fake_procfs import write

from torch_kvswap._native.loader import native
from torch_kvswap.cli import doctor
from torch_kvswap.host_pool import system


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
        "encodings",
        "copy costs",
        "host memory",
        "0",
    ]


def test_doctor_says_where_the_costs_of_each_kind_of_gpu_are_from(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("KVSWAP_COPY_METHOD_COSTS", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(system, "ROOT", tmp_path)
    assert doctor.report()["copy costs"] == "unknown: the system names no GPU"
    for number, model in enumerate(["Imaginary 9000", "Imaginary 9000", "Other GPU"]):
        file = f"proc/driver/nvidia/gpus/{number}/information"
        write(tmp_path, file, f"Model: \t\t {model}\nIRQ:   1\n")
    assert doctor.report()["copy costs"] == (
        "copy_method_costs.json, NVIDIA H200 (Imaginary 9000), copy_method_costs.json, NVIDIA H200 (Other GPU)"
    )
    monkeypatch.setenv("KVSWAP_COPY_METHOD_COSTS", "/nowhere")
    assert doctor.report()["copy costs"].startswith(
        "none: the costs of the copy methods cannot be read"
    )


def test_doctor_says_how_much_host_memory_is_available(tmp_path, monkeypatch):
    text = "MemAvailable: 8388608 kB\nHugePages_Free: 3\nHugepagesize: 2048 kB\n"
    write(tmp_path, "proc/meminfo", text)
    write(tmp_path, "proc/self/cgroup", "0::/\n")
    write(tmp_path, "sys/fs/cgroup/memory.max", f"{5 << 30}\n")
    write(tmp_path, "sys/fs/cgroup/memory.current", f"{1 << 30}\n")
    write(tmp_path, "sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n")
    monkeypatch.setattr(system, "ROOT", tmp_path)
    assert doctor.report()["host memory"] == (
        "4.0 GiB available; transparent huge pages available; 3 reserved huge pages of 2 MiB free"
    )


def test_doctor_says_why_blocks_are_encoded_on_the_cpu_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prefix = "raw; lossless, 12.125 or 12.5 instead of 16 bits for each bfloat16, on "
    for kernels, runs, said in (
        (13000, 13000, "the CPU and CUDA"),
        (13000, 0, "the CPU only: there is no CUDA driver"),
        (13000, 12080, "the CPU only: there are no CUDA kernels for this driver"),
        (0, 13000, "the CPU only: there are no CUDA kernels for this driver"),
    ):
        monkeypatch.setattr(native, "kernel_version", lambda version=kernels: version)
        monkeypatch.setattr(native, "driver_version", lambda version=runs: version)
        monkeypatch.setattr(native, "driver_has_batch", lambda: False)
        assert doctor.report()["encodings"] == prefix + said
