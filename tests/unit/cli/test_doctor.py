"""The command doctor: what it finds on a machine, and what is at fault there."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fake_procfs import write

from torch_kvswap.cli import doctor
from torch_kvswap.host_pool import system


def plug_in(root: Path, lanes: int = 16, port: str = "32.0", speed: str = "32.0") -> None:
    """A GPU 0000:01:00.0 on node 1, behind a port of this speed."""
    write(root, "proc/driver/nvidia/gpus/0000:01:00.0/information", "Model: \t Imaginary\n")
    write(root, "sys/devices/pci0/max_link_speed", f"{port} GT/s PCIe\n")
    texts = {"numa_node": "1", "current_link_width": f"{lanes}", "max_link_width": "16"}
    texts |= {"current_link_speed": f"{speed} GT/s PCIe", "max_link_speed": "32.0 GT/s PCIe"}
    for name, text in texts.items():
        write(root, f"sys/devices/pci0/0000:01:00.0/{name}", f"{text}\n")
    device = root / "sys/bus/pci/devices/0000:01:00.0"
    device.parent.mkdir(parents=True)
    device.symlink_to(root / "sys/devices/pci0/0000:01:00.0")


def test_every_topic_is_reported_and_cuda_left_alone() -> None:
    program = (
        "import torch; from torch_kvswap.cli import doctor; print(doctor.main([]));"
        "assert not torch.cuda.is_initialized()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    topics = {line.partition(":")[0] for line in done.stdout.splitlines()}
    assert topics > {"library", "PyTorch", "CUDA driver", "CUDA kernels", "host memory", "vLLM"}


def test_a_fault_has_a_remedy_and_an_exit_code(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    roots = [tmp_path / name for name in ("whole", "at fault")]
    plug_in(roots[0])
    plug_in(roots[1], lanes=8, port="16.0")
    write(roots[1], "sys/devices/system/node/online", "0-1\n")
    own = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    write(roots[1], "sys/devices/system/node/node0/cpulist", f"{own}\n")
    monkeypatch.setattr(system, "ROOT", roots[0])
    assert doctor.main([]) == 0
    line = "GPU 0000:01:00.0: Imaginary, NUMA node 1, 16 PCIe lanes of generation 5\n"
    assert line in capsys.readouterr().out
    monkeypatch.setattr(system, "ROOT", roots[1])
    assert doctor.main(["--json"]) == 1
    assert json.loads(capsys.readouterr().out)["GPU 0000:01:00.0"] == {
        "text": "Imaginary, NUMA node 1, 8 of 16 PCIe lanes of generation 4 (the card's is 5); this "
        "process may not run on node 1: numactl --cpunodebind=1; reseat the card, or use another slot",
        "is_fault": True,
    }


def test_what_limits_host_memory_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(system, "ROOT", tmp_path)
    monkeypatch.setattr(system, "memlock_limit", lambda: 65536)
    write(tmp_path, "proc/meminfo", "MemAvailable: 8388608 kB\n")
    write(tmp_path, "proc/self/cgroup", "0::/\n")
    write(tmp_path, "sys/fs/cgroup/memory.max", f"{5 << 30}\n")
    write(tmp_path, "sys/fs/cgroup/memory.current", f"{1 << 30}\n")
    assert doctor.report()["host memory"].text == (
        "4.0 GiB available (/sys/fs/cgroup/memory.max); locked memory 65536 bytes, which drivers "
        "need not obey; transparent huge pages not available"
    )


def test_an_engine_that_is_not_supported_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda package: "5.9.0")
    found = doctor.report()
    for engine, advice in (
        ("vLLM", "0.26.0 or 0.33.0"),
        ("transformers", "transformers 5.17 to 5.24"),
    ):
        said = f"5.9.0, which was not tested; install {advice}"
        assert found[engine] == doctor.Finding(said, is_fault=True)
    monkeypatch.setattr(importlib.metadata, "version", lambda package: "5.24.1")
    assert doctor.report()["transformers"] == doctor.Finding("5.24.1")


@pytest.mark.parametrize(
    ("rate", "speed", "code", "said"),
    [
        (55e9, "32.0", 0, "stores 55.0 GB/s, loads 56.0 GB/s, 87% of the 63.0 GB/s of "),
        (25e9, "32.0", 1, "stores 25.0 GB/s, loads 26.0 GB/s, 40% of the 63.0 GB/s of "),
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
    plug_in(tmp_path, speed=speed)
    monkeypatch.setattr(system, "ROOT", tmp_path)
    link = system.link_of("0000:01:00.0")
    monkeypatch.setattr(doctor, "_rates", lambda device: (rate, rate + 1e9, link))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert doctor.main(["--measure"]) == code
    assert f"link of GPU 0:    {'FAULT: ' * code}{said}" in capsys.readouterr().out
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert doctor.main(["--measure"]) == 2


@pytest.mark.gpu
def test_a_big_copy_each_way_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    doctor.main(["--measure", "--json"])  # may find a fault of the machine
    text = json.loads(capsys.readouterr().out)["link of GPU 0"]["text"]
    rates = map(float, re.findall(r"([\d.]+) GB/s", text)[:2])
    assert all(1 < rate < 1000 for rate in rates)
