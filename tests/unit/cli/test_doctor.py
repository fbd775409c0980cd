import importlib.metadata
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_procfs import write

from torch_kvswap._native.loader import native
from torch_kvswap.cli import doctor
from torch_kvswap.host_pool import system


def fake_nvml(mode: int) -> Any:
    """The driver's library, for one GPU."""

    def find(address: bytes, handle: object) -> int:
        return 0 if address == b"0000:01:00.0" else 6

    def read_memory(handle: object, memory: Any) -> int:
        memory._obj.total, memory._obj.free = 80 << 30, 60 << 30
        return 0

    def read_mode(handle: object, now: Any, pending: object) -> int:
        now._obj.value = mode
        return 0

    return SimpleNamespace(
        nvmlInit_v2=lambda: 0,
        nvmlDeviceGetHandleByPciBusId_v2=find,
        nvmlDeviceGetMemoryInfo=read_memory,
        nvmlDeviceGetMigMode=read_mode,
    )


@pytest.fixture(autouse=True)
def no_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of a GPU of this machine is no matter of these tests."""
    monkeypatch.setattr(doctor, "_nvml", lambda: None)


def test_the_memory_of_a_gpu_and_its_instances_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for mode, parts in ((0, ""), (1, ", divided into MIG instances")):
        monkeypatch.setattr(doctor, "_nvml", lambda mode=mode: fake_nvml(mode))
        assert doctor._memory_of("0000:01:00.0") == f", 60.0 of 80.0 GiB free{parts}"
    assert doctor._memory_of("0000:02:00.0") == ""


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
        "host memory",
        "memory limits",
        "NUMA nodes",
        "vLLM",
        "transformers",
        "0",
    ]


def plug_in(root: Path, speed: str) -> None:
    """Lets the GPU 0000:01:00.0 be on node 1, with 16 lanes, behind a port of this speed."""
    device = "sys/devices/pci0/0000:01:00.0"
    for name, text in (
        ("numa_node", "1"),
        ("current_link_width", "16"),
        ("max_link_width", "16"),
        ("current_link_speed", "32.0 GT/s PCIe"),
        ("max_link_speed", "32.0 GT/s PCIe"),
        ("../max_link_speed", speed),
    ):
        write(root, f"{device}/{name}", f"{text}\n")
    link = root / "sys/bus/pci/devices/0000:01:00.0"
    link.parent.mkdir(parents=True)
    link.symlink_to(root / device)


def test_a_process_that_may_not_run_on_the_node_of_its_gpu_is_a_fault(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(system, "ROOT", tmp_path)
    plug_in(tmp_path, "32.0 GT/s PCIe")
    write(tmp_path, "proc/driver/nvidia/gpus/0000:01:00.0/information", "Model: \t Imaginary\n")
    write(tmp_path, "sys/devices/system/node/online", "0-1\n")
    own = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    write(tmp_path, "sys/devices/system/node/node0/cpulist", f"{own}\n")
    write(tmp_path, "sys/devices/system/node/node1/cpulist", "9999\n")
    found = doctor.report()
    assert found["GPU 0000:01:00.0"].is_fault
    assert found["GPU 0000:01:00.0"].text.endswith(
        "; this process may not run on node 1: numactl --cpunodebind=1"
    )
    assert found["NUMA nodes"].text == "[0, 1], of which this process may use the CPUs of [0]"


@pytest.mark.parametrize(
    ("rate", "speed", "code", "said"),
    [
        (55e9, "32.0 GT/s PCIe", 0, "stores 55.0 GB/s, loads 56.0 GB/s, 87% of the 63.0 GB/s of "),
        (25e9, "32.0 GT/s PCIe", 1, "stores 25.0 GB/s, loads 26.0 GB/s, 40% of the 63.0 GB/s of "),
        (25e9, "?", 0, "stores 25.0 GB/s, loads 26.0 GB/s; the system does not say what the link"),
    ],
)
def test_a_measured_copy_is_compared_with_the_link(
    rate: float,
    speed: str,
    code: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(system, "ROOT", tmp_path)
    plug_in(tmp_path, "32.0 GT/s PCIe")
    write(tmp_path, "sys/devices/pci0/0000:01:00.0/current_link_speed", f"{speed}\n")
    link = system.link_of("0000:01:00.0")
    monkeypatch.setattr(doctor, "_rates", lambda device: ((rate, rate + 1e9), link))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert doctor.main(["--measure"]) == code
    assert f"link of GPU 0:    {'FAULT: ' * code}{said}" in capsys.readouterr().out


def test_there_is_nothing_to_measure_without_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert doctor.main(["--measure"]) == 2
    assert capsys.readouterr() == ("", "there is no NVIDIA GPU to measure\n")


@pytest.mark.gpu
def test_a_big_copy_each_way_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    doctor.main(["--measure", "--json"])  # may find a fault of the machine
    text = json.loads(capsys.readouterr().out)["link of GPU 0"]["text"]
    stores, loads = map(float, re.findall(r"([\d.]+) GB/s", text)[:2])
    assert 1 < stores < 1000
    assert 1 < loads < 1000


def test_a_fault_is_named_with_its_remedy_and_by_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(system, "ROOT", tmp_path)
    write(tmp_path, "proc/driver/nvidia/gpus/0000:01:00.0/information", "Model: \t Imaginary\n")
    device = "sys/bus/pci/devices/0000:01:00.0"
    plug_in(tmp_path, "32.0 GT/s PCIe")
    assert doctor.main([]) == 0
    assert (
        "GPU 0000:01:00.0: Imaginary, NUMA node 1, 16 PCIe lanes of generation 5\n"
        in capsys.readouterr().out
    )
    write(tmp_path, f"{device}/current_link_width", "8\n")
    write(tmp_path, "sys/devices/pci0/max_link_speed", "16.0 GT/s PCIe\n")
    assert doctor.main(["--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["GPU 0000:01:00.0"] == {
        "text": "Imaginary, NUMA node 1, 8 of 16 PCIe lanes of generation 4 (the card's is 5); "
        "reseat the card, or use another slot",
        "is_fault": True,
    }
    assert [topic for topic in found if found[topic]["is_fault"]] == ["GPU 0000:01:00.0"]


@pytest.mark.parametrize(
    ("package", "version", "said"),
    [
        ("vllm", "0.33.0+cu130", "0.33.0+cu130"),
        ("vllm", "0.32.1", "0.32.1, which was not tested; install 0.26.0 or 0.33.0"),
        ("transformers", "5.24.1", "5.24.1"),
        ("transformers", "5.9.0", "5.9.0, which was not tested; install transformers 5.17 to 5.24"),
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
    write(tmp_path, "proc/meminfo", "MemAvailable: 8388608 kB\n")
    write(tmp_path, "proc/self/cgroup", "0::/\n")
    write(tmp_path, "sys/fs/cgroup/memory.max", f"{5 << 30}\n")
    write(tmp_path, "sys/fs/cgroup/memory.current", f"{1 << 30}\n")
    write(tmp_path, "sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n")
    monkeypatch.setattr(system, "ROOT", tmp_path)
    monkeypatch.setattr(system, "memlock_limit", lambda: 65536)
    assert doctor.report()["memory limits"].text == (
        "locked memory 65536 bytes, which drivers need not obey; "
        "4.0 of 5.0 GiB left in /sys/fs/cgroup/memory.max"
    )
    assert doctor.report()["host memory"].text == (
        "4.0 GiB available; transparent huge pages available"
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
