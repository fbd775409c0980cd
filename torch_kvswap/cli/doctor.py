"""Report what this installation can do on this machine.

Without --measure it does not initialise CUDA, so it does not disturb other processes. Exits with 1
if it finds a fault.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import re
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from torch_kvswap._native.arguments import count_of
from torch_kvswap._native.loader import WITHOUT_KERNELS, native
from torch_kvswap.devices.kind import is_native
from torch_kvswap.host_pool import system
from torch_kvswap.integrations import TESTED, is_tested, transformers

_MEASURED_BYTES, _COPIES = 256 << 20, 5
_MIN_LINK_SHARE = 0.7  # of the link's bandwidth, or a fault is reported; an H200 reaches 0.86


class Finding(NamedTuple):
    text: str  # of a fault with its remedy
    is_fault: bool = False


def _release(version: int) -> str:
    """A version number as text: 12080 is "CUDA 12.8"."""
    return f"CUDA {version // 1000}.{version % 1000 // 10}"


def _driver() -> Finding:
    version = native.driver_version()
    if not version:
        why = native.driver_error()
        return Finding(f"none: {why}", is_fault="cannot be loaded" not in why)
    if native.driver_has_batch():
        return Finding(_release(version))
    return Finding(f"{_release(version)}; one for CUDA 12.8 copies scattered blocks faster")


def _kernels() -> Finding:
    runtime, driver = native.kernel_version(), native.driver_version()
    if not runtime:
        remedy = "install nvcc 12.0 or newer and build again"
        return Finding(f"none: built without nvcc, {WITHOUT_KERNELS}; {remedy}", driver > 0)
    text = f"built with {_release(runtime)}"
    if not driver or driver // 1000 >= runtime // 1000:
        return Finding(text)
    remedy = "update the driver or build with an older nvcc"
    return Finding(f"{text}, too new for the driver, {WITHOUT_KERNELS}; {remedy}", is_fault=True)


def _gpus() -> dict[str, Finding]:
    """Where the GPUs are that the NVIDIA driver names. An idle link is never narrower."""
    found, nodes = {}, system.nodes_of_process()
    for file in sorted(system.ROOT.glob("proc/driver/nvidia/gpus/*/information")):
        address, faults = file.parent.name, []
        model = re.search(r"^Model:\s*(.+?)\s*$", file.read_text(), re.M)
        node, link = system.numa_node_of(address), system.link_of(address)
        text = model[1] if model else "of unknown model"
        if node is not None:
            text += f", NUMA node {node}"
            if nodes and node not in nodes:
                remedy = f"numactl --cpunodebind={node}"
                faults.append(f"this process may not run on node {node}: {remedy}")
        if link.lanes:
            text += f", {link.lanes} of {link.most_lanes} PCIe lanes"
            if link.lanes < link.most_lanes:
                faults.append("reseat the card, or use another slot")
        found[f"GPU {address}"] = Finding("; ".join([text, *faults]), is_fault=bool(faults))
    return found


def _host_memory() -> str:
    """What limits the memory of pools of this process."""
    rooms = [(limit.left, f" ({limit.file})") for limit in system.control_group_limits()]
    rooms.append((system.available_bytes() or 0, ""))
    room, file = min(rooms)
    text = f"{max(room, 0) / 2**30:.1f} GiB available{file}"
    if (locked := system.memlock_limit()) is not None:
        text += f"; limit on locked memory: {locked} bytes, which a driver may ignore"
    return text if system.offers_huge_pages() else f"{text}; no transparent huge pages"


def _engine(package: str, is_supported: Callable[[str], bool], supported: str) -> Finding:
    try:
        version = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return Finding("not installed")
    if is_supported(version):
        return Finding(version)
    return Finding(f"{version}, which was not tested; install {supported}", is_fault=True)


def report() -> dict[str, Finding]:
    """What the installation has, by topic."""
    cuda, hip = torch.version.cuda, torch.version.hip
    platform = f"CUDA {cuda}" if cuda else f"HIP {hip}" if hip else "without CUDA"
    gpus, count = _gpus(), torch.cuda.device_count()
    pytorch = f"{torch.__version__} ({platform}), {count_of(count, 'GPU')}"
    if is_unable := bool(gpus) and not count:
        pytorch += "; for the GPUs below install a build with CUDA, or check CUDA_VISIBLE_DEVICES"
    return {
        "library": Finding(str(native.__file__)),
        "PyTorch": Finding(pytorch, is_unable),
        "CUDA driver": _driver(),
        **gpus,
        "CUDA kernels": _kernels(),
        "host memory": Finding(_host_memory()),
        "vLLM": _engine("vllm", partial(is_tested, "vllm"), TESTED["vllm"]),
        "SGLang": _engine("sglang", partial(is_tested, "sglang"), TESTED["sglang"]),
        "transformers": _engine("transformers", transformers.is_known, transformers.KNOWN),
    }


def _measure(gpu: int) -> Finding:
    """A big copy each way, against what the link can move. Initialises CUDA."""
    try:
        store, load, most = _rates(gpu)
    except RuntimeError as error:  # also no memory
        return Finding(f"not measured: {str(error).splitlines()[0]}", is_fault=True)
    text = f"stores {store:.1f} GB/s, loads {load:.1f} GB/s"
    text += f"; the link moves {most:.1f} GB/s" if most else "; the link's speed is unknown"
    if min(store, load) >= _MIN_LINK_SHARE * most:
        return Finding(text)
    remedy = "end what else uses the link or the memory, run on the GPU's NUMA node, or ask who"
    return Finding(f"{text}: {remedy} runs the machine whether the GPU shares its link", True)


def _rates(gpu: int) -> tuple[float, float, float]:
    """The fastest store and load, and what the link can move while it is in use, in GB/s."""
    here = torch.empty(_MEASURED_BYTES, dtype=torch.uint8, device="cpu", pin_memory=True)
    there = torch.empty_like(here, device=torch.device("cuda", gpu), pin_memory=False)
    rates = []
    for target, source in ((here, there), (there, here)):
        target.copy_(source, non_blocking=True)
        most = system.link_of(native.pci_address(gpu)).bytes_per_second / 1e9
        seconds = []
        for _ in range(_COPIES):
            start = time.perf_counter()
            target.copy_(source)  # which waits
            seconds.append(time.perf_counter() - start)
        rates.append(_MEASURED_BYTES / min(seconds) / 1e9)
    return rates[0], rates[1], most


def main(arguments: list[str]) -> int:
    """Runs the command. Returns 1 if it finds a fault, 2 if there is no GPU to measure."""
    parser = argparse.ArgumentParser("python -m torch_kvswap doctor", description=__doc__)
    parser.add_argument("--measure", action="store_true", help="time a large copy with each GPU")
    options = parser.parse_args(arguments)
    found = report()
    if options.measure:
        if not (torch.cuda.is_available() and is_native("cuda")):
            print("there is no NVIDIA GPU to measure", file=sys.stderr)
            return 2
        found |= {f"link of GPU {gpu}": _measure(gpu) for gpu in range(torch.cuda.device_count())}
    for topic, finding in found.items():
        print(f"{topic + ':':18}{'FAULT: ' if finding.is_fault else ''}{finding.text}")
    return int(any(finding.is_fault for finding in found.values()))
