import importlib.metadata
import json
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
        "vLLM",
        "transformers",
        "0",
    ]


def test_doctor_says_where_the_costs_of_each_kind_of_gpu_are_from(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("KVSWAP_COPY_METHOD_COSTS", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(system, "ROOT", tmp_path)
    assert doctor.report()["copy costs"].text == "unknown: the system names no GPU"
    for number, model in enumerate(["Imaginary 9000", "Imaginary 9000", "Other GPU"]):
        file = f"proc/driver/nvidia/gpus/{number}/information"
        write(tmp_path, file, f"Model: \t\t {model}\nIRQ:   1\n")
    assert doctor.report()["copy costs"].text == (
        "copy_method_costs.json, NVIDIA H200 (Imaginary 9000), copy_method_costs.json, NVIDIA H200 (Other GPU)"
    )
    monkeypatch.setenv("KVSWAP_COPY_METHOD_COSTS", "/nowhere")
    assert doctor.report()["copy costs"].text.startswith(
        "none: the costs of the copy methods cannot be read"
    )


def test_a_fault_is_named_with_its_remedy_and_by_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("KVSWAP_COPY_METHOD_COSTS", raising=False)
    monkeypatch.setattr(system, "ROOT", tmp_path)
    write(tmp_path, "proc/driver/nvidia/gpus/0000:01:00.0/information", "Model: \t Imaginary\n")
    device = "sys/bus/pci/devices/0000:01:00.0"
    for name, text in (("numa_node", "1"), ("current_link_width", "16"), ("max_link_width", "16")):
        write(tmp_path, f"{device}/{name}", f"{text}\n")
    assert doctor.main([]) == 0
    assert "GPU 0000:01:00.0: Imaginary, NUMA node 1, 16 PCIe lanes\n" in capsys.readouterr().out
    write(tmp_path, f"{device}/current_link_width", "8\n")
    assert doctor.main(["--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["GPU 0000:01:00.0"] == {
        "text": "Imaginary, NUMA node 1, 8 of 16 PCIe lanes: reseat the card, or use another slot",
        "is_fault": True,
    }
    assert [topic for topic in found if found[topic]["is_fault"]] == ["GPU 0000:01:00.0"]


@pytest.mark.parametrize(
    ("package", "version", "said"),
    [
        ("vllm", "0.33.0+cu130", "0.33.0+cu130"),
        ("vllm", "0.32.1", "0.32.1, which was not tested; install 0.26.0 or 0.33.0"),
        ("transformers", "5.23.1", "5.23.1"),
        ("transformers", "5.9.0", "5.9.0, which was not tested; install transformers 5.17 to 5.23"),
    ],
)
def test_doctor_says_which_engines_are_supported(
    package: str, version: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version_of(name: str) -> str:
        if name == package:
            return version
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version_of)
    found = doctor.report()[{"vllm": "vLLM"}.get(package, package)]
    assert found == doctor.Finding(said, is_fault=said != version)


def test_doctor_says_how_much_host_memory_is_available(tmp_path, monkeypatch):
    text = "MemAvailable: 8388608 kB\nHugePages_Free: 3\nHugepagesize: 2048 kB\n"
    write(tmp_path, "proc/meminfo", text)
    write(tmp_path, "proc/self/cgroup", "0::/\n")
    write(tmp_path, "sys/fs/cgroup/memory.max", f"{5 << 30}\n")
    write(tmp_path, "sys/fs/cgroup/memory.current", f"{1 << 30}\n")
    write(tmp_path, "sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n")
    monkeypatch.setattr(system, "ROOT", tmp_path)
    assert doctor.report()["host memory"].text == (
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
        assert doctor.report()["encodings"].text == prefix + said
