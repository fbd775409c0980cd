"""The command doctor: what is at fault on a machine, with the remedy."""

from __future__ import annotations

import importlib.metadata
import os
import re
from pathlib import Path

import pytest
import torch
from fake_procfs import write
from processes import run_script

import torch_kvswap as kvs
from torch_kvswap import __main__ as program
from torch_kvswap.cli import doctor, serve
from torch_kvswap.host_pool import system


def test_it_does_not_initialise_cuda() -> None:
    printed = run_script("""
        from torch_kvswap.cli import doctor
        doctor.main([])
        assert not torch.cuda.is_initialized()
    """)
    topics = {line.partition(":")[0] for line in printed.splitlines()}
    assert topics > {"library", "PyTorch", "CUDA driver", "CUDA kernels", "host memory", "vLLM"}


def test_a_fault_has_remedy_and_exit_code(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, "proc/driver/nvidia/gpus/0000:01:00.0/information", "Model: \t Imaginary\n")
    gpu = "sys/bus/pci/devices/0000:01:00.0"
    for name, text in {"numa_node": 1, "current_link_width": 8, "max_link_width": 16}.items():
        write(tmp_path, f"{gpu}/{name}", f"{text}\n")
    write(tmp_path, "sys/devices/system/node/online", "0-1\n")
    own = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    write(tmp_path, "sys/devices/system/node/node0/cpulist", f"{own}\n")
    monkeypatch.setattr(system, "ROOT", tmp_path)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert doctor.main([]) == 1
    assert (
        "GPU 0000:01:00.0: FAULT: Imaginary, NUMA node 1, 8 of 16 PCIe lanes; this process may not "
        "run on node 1: numactl --cpunodebind=1; reseat the card, or use another slot\n"
    ) in capsys.readouterr().out
    write(tmp_path, f"{gpu}/current_link_width", "16\n")
    write(tmp_path, f"{gpu}/numa_node", "0\n")
    assert doctor.main([]) == 0
    capsys.readouterr()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert doctor.main([]) == 1
    assert "(without CUDA), 0 GPUs; for the GPUs below install a build" in capsys.readouterr().out


def test_what_limits_host_memory_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(system, "ROOT", tmp_path)
    write(tmp_path, "proc/meminfo", "MemAvailable: 8388608 kB\n")
    write(tmp_path, "proc/self/cgroup", "0::/\n")
    write(tmp_path, "sys/fs/cgroup/memory.max", f"{5 << 30}\n")
    write(tmp_path, "sys/fs/cgroup/memory.current", f"{1 << 30}\n")
    found = doctor.report()["host memory"].text
    assert found.startswith("4.0 GiB available (/sys/fs/cgroup/memory.max)")


def test_an_unsupported_engine_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda package: "5.9.0")
    assert doctor.report()["vLLM"].is_fault
    assert doctor.report()["transformers"].is_fault
    assert doctor.report()["SGLang"].is_fault
    for version in ("5.18.0", "5.24.1"):
        monkeypatch.setattr(importlib.metadata, "version", lambda _, known=version: known)
        assert doctor.report()["transformers"] == doctor.Finding(version)


@pytest.mark.parametrize(("rate", "is_fault"), [(55.0, False), (25.0, True)])
def test_a_measured_copy_is_compared_with_the_link(
    rate: float, is_fault: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_rates", lambda gpu: (rate + 1, rate, 63.0))
    assert doctor._measure(0).is_fault == is_fault
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert doctor.main(["--measure"]) == 2


@pytest.mark.gpu
def test_a_big_copy_each_way_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    doctor.main(["--measure"])  # may find a fault of the machine
    (text,) = re.findall(r"link of GPU 0:.*", capsys.readouterr().out)
    rates = map(float, re.findall(r"([\d.]+) GB/s", text)[:2])
    assert all(1 < rate < 1000 for rate in rates)


def test_a_command_gets_arguments_and_gives_its_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for module, name in ((doctor, "doctor"), (serve, "serve")):
        monkeypatch.setattr(module, "main", len)
        assert program.main([name, "--one", "--two"]) == 2
    assert program.main(["dance"]) == 2
    assert capsys.readouterr().err.startswith("torch_kvswap has no command 'dance'\nusage: ")
    assert program.main([]) == 0
    capsys.readouterr()
    assert program.main(["--version"]) == 0
    assert capsys.readouterr().out == f"torch_kvswap {kvs.__version__}\n"
