"""Report what this installation can do on this machine.

Without --measure it does not initialise CUDA, so it does not disturb other processes. Exits with 1
if it finds a fault.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
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
    """A finding about a topic; a fault has a remedy."""

    text: str
    is_fault: bool = False


def _release(version: int) -> str:
    """A version number as text: 12080 is "CUDA 12.8"."""
    return f"CUDA {version // 1000}.{version % 1000 // 10}"


def _pytorch() -> str:
    cuda, hip = torch.version.cuda, torch.version.hip
    platform = f"CUDA {cuda}" if cuda else f"HIP {hip}" if hip else "without CUDA"
    return f"{torch.__version__} ({platform}), {count_of(torch.cuda.device_count(), 'GPU')}"


def _driver() -> Finding:
    if version := native.driver_version():
        return Finding(_release(version))
    why = native.driver_error()
    return Finding(f"none: {why}", is_fault="cannot be loaded" not in why)


def _kernels() -> Finding:
    runtime, driver = native.kernel_version(), native.driver_version()
    if not runtime:
        return Finding(f"none: built without nvcc, {WITHOUT_KERNELS}", is_fault=driver > 0)
    if not driver or driver // 1000 >= runtime // 1000:
        return Finding(f"built with {_release(runtime)}")
    return Finding(
        f"built with {_release(runtime)}, too new for the driver, {WITHOUT_KERNELS}; update the "
        "driver or build with an older nvcc",
        is_fault=True,
    )


def _scattered_copies() -> Finding:
    if not native.driver_version():
        return Finding("no driver: host memory only")
    if not native.driver_has_batch():
        return Finding("one call per fragment: the driver is older than CUDA 12.8")
    try:
        is_on = native.batch_is_on()
    except ValueError as error:
        return Finding(f"none: {error}", is_fault=True)
    return Finding("cuMemcpyBatchAsync" if is_on else "one call per fragment: KVSWAP_BATCH=0")


def _gpus() -> dict[str, Finding]:
    """Where the GPUs are that the NVIDIA driver names."""
    found = {}
    for file in sorted(system.ROOT.glob("proc/driver/nvidia/gpus/*/information")):
        if model := re.search(r"^Model:\s*(.+?)\s*$", file.read_text(), re.M):
            found[f"GPU {file.parent.name}"] = _gpu(file.parent.name, model[1])
    return found


def _gpu(address: str, text: str) -> Finding:
    """An idle link is slower than it can be, but never narrower."""
    node, nodes = system.numa_node_of(address), system.nodes_of_process()
    link, faults = system.link_of(address), []
    if node is not None:
        text += f", NUMA node {node}"
        if nodes and node not in nodes:
            faults.append(f"this process may not run on node {node}: numactl --cpunodebind={node}")
    if link.lanes:
        text += f", {link.lanes} of {link.most_lanes} PCIe lanes"
        if link.lanes < link.most_lanes:
            faults.append("reseat the card, or use another slot")
    if 0 < link.port_generation < link.most_generation:
        text += f" of generation {link.port_generation} (the card's is {link.most_generation})"
    return Finding("; ".join([text, *faults]), is_fault=bool(faults))


def _host_memory() -> str:
    """What limits the memory of pools of this process."""
    rooms = [(limit.left, f" ({limit.file})") for limit in system.control_group_limits()]
    if (available := system.available_bytes()) is not None:
        rooms.append((available, ""))
    room, file = min(rooms, default=(0, ""))
    text = f"{max(room, 0) / 2**30:.1f} GiB available{file}" if rooms else "of unknown size"
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
    return {
        "library": Finding(str(native.__file__)),
        "PyTorch": Finding(_pytorch()),
        "CUDA driver": _driver(),
        **_gpus(),
        "CUDA kernels": _kernels(),
        "scattered copies": _scattered_copies(),
        "host memory": Finding(_host_memory()),
        "vLLM": _engine("vllm", partial(is_tested, "vllm"), TESTED["vllm"]),
        "SGLang": _engine("sglang", partial(is_tested, "sglang"), TESTED["sglang"]),
        "transformers": _engine("transformers", transformers.is_known, transformers.KNOWN),
    }


def _measure(gpu: int) -> Finding:
    """A big copy each way, against what the link can move. Initialises CUDA."""
    try:
        rates, link = _rates(torch.device("cuda", gpu))
    except RuntimeError as error:  # also no memory
        return Finding(f"not measured: {str(error).splitlines()[0]}", is_fault=True)
    text = "stores {:.1f} GB/s, loads {:.1f} GB/s".format(*(rate / 1e9 for rate in rates))
    if not (most := link.bytes_per_second):
        return Finding(f"{text}; the system does not say what the link is")
    share = min(rates) / most
    text += f", {share:.0%} of the {most / 1e9:.1f} GB/s of {link.lanes} PCIe lanes"
    if share >= _MIN_LINK_SHARE:
        return Finding(text)
    return Finding(
        f"{text}: end what else uses the link or the memory, run on the GPU's NUMA node, or ask "
        "who runs the machine whether the GPU shares its link",
        is_fault=True,
    )


def _rates(device: torch.device) -> tuple[list[float], system.Link]:
    """Bytes per second of the fastest store and load, and the link while it is in use."""
    here = torch.empty(_MEASURED_BYTES, dtype=torch.uint8, device="cpu", pin_memory=True)
    there = torch.empty_like(here, device=device, pin_memory=False)
    rates = []
    for target, source in ((here, there), (there, here)):
        target.copy_(source, non_blocking=True)
        link = system.link_of(native.pci_address(device.index))
        seconds = []
        for _ in range(_COPIES):
            torch.cuda.synchronize(device)
            start = time.perf_counter()
            target.copy_(source)
            torch.cuda.synchronize(device)
            seconds.append(time.perf_counter() - start)
        rates.append(_MEASURED_BYTES / min(seconds))
    return rates, link


def main(arguments: list[str]) -> int:
    """Runs the command.

    Returns:
        int: the exit code; 1 if it finds a fault, 2 if there is no GPU to measure.
    """
    parser = argparse.ArgumentParser("python -m torch_kvswap doctor", description=__doc__)
    parser.add_argument(
        "--json", action="store_true", help="print JSON, for programs and bug reports"
    )
    parser.add_argument("--measure", action="store_true", help="time a large copy with each GPU")
    options = parser.parse_args(arguments)
    found = report()
    if options.measure:
        if not (torch.cuda.is_available() and is_native("cuda")):
            print("there is no NVIDIA GPU to measure", file=sys.stderr)
            return 2
        found |= {f"link of GPU {gpu}": _measure(gpu) for gpu in range(torch.cuda.device_count())}
    if options.json:
        print(json.dumps({topic: finding._asdict() for topic, finding in found.items()}, indent=1))
    else:
        for topic, finding in found.items():
            print(f"{topic + ':':18}{'FAULT: ' if finding.is_fault else ''}{finding.text}")
    return int(any(finding.is_fault for finding in found.values()))
