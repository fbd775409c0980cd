"""Report what this installation can do on this machine.

Does not initialise CUDA, so it does not disturb other processes.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import re
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch

from torch_kvswap._native.loader import native
from torch_kvswap.copy_method import read_costs
from torch_kvswap.devices.kind import is_native
from torch_kvswap.encoding.slot import WIDTHS
from torch_kvswap.host_pool import system
from torch_kvswap.integrations import transformers
from torch_kvswap.integrations.vllm import options as vllm

_MISSING = "so nothing is staged, and expand_block_ids takes CPU ids only"


class Finding(NamedTuple):
    """What was found about a topic.

    Attributes:
        text (str): what there is; of a fault, with the remedy.
        is_fault (bool): something is there and does not work as it could.
    """

    text: str
    is_fault: bool = False


def _release(version: int) -> str:
    """A version number as text: 12080 is "CUDA 12.8"."""
    return f"CUDA {version // 1000}.{version % 1000 // 10}"


def _driver() -> Finding:
    if version := native.driver_version():
        return Finding(_release(version))
    why = native.driver_error()
    return Finding(f"none: {why}", is_fault="cannot be loaded" not in why)


def _kernels() -> Finding:
    runtime, driver = native.kernel_version(), native.driver_version()
    if not runtime:
        return Finding(f"none: built without nvcc, {_MISSING}", is_fault=driver > 0)
    if driver and driver // 1000 < runtime // 1000:
        return Finding(
            f"built with {_release(runtime)}, too new for the driver, {_MISSING}; update the "
            "driver or build with an older nvcc",
            is_fault=True,
        )
    return Finding(f"built with {_release(runtime)}")


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


def _gpus() -> dict[str, str]:
    """The models of the GPUs that the NVIDIA driver names, by PCI address."""
    files = sorted(system.ROOT.glob("proc/driver/nvidia/gpus/*/information"))
    found = {f: re.search(r"^Model:\s*(.+?)\s*$", f.read_text(), re.M) for f in files}
    return {file.parent.name: model[1] for file, model in found.items() if model}


def _gpu(address: str, model: str) -> Finding:
    """Where a GPU is. An idle link is slower than it can be, but never narrower."""
    node, width, most = system.numa_node_of(address), *system.link_widths_of(address)
    text = model + ("" if node is None else f", NUMA node {node}")
    if not width:
        return Finding(text)
    if width < most:
        text = f"{text}, {width} of {most} PCIe lanes: reseat the card, or use another slot"
        return Finding(text, is_fault=True)
    return Finding(f"{text}, {width} PCIe lanes")


def _copy_method_costs(models: Iterable[str]) -> Finding:
    """The source of the copy-method costs for each GPU model in the system."""
    try:
        sources = [f"{read_costs(model).source} ({model})" for model in sorted(set(models))]
    except ValueError as error:
        return Finding(f"none: {error}", is_fault=True)
    return Finding(", ".join(sources) or "unknown: the system names no GPU")


def _engine(package: str, is_supported: Callable[[str], bool], supported: str) -> Finding:
    try:
        version = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return Finding("not installed")
    if is_supported(version):
        return Finding(version)
    return Finding(f"{version}, which was not tested; install {supported}", is_fault=True)


def _host_memory() -> str:
    available, reserved = system.available_bytes(), system.reserved_huge_pages()
    limits = [limit.left for limit in system.control_group_limits()]
    room = min([*limits, *([] if available is None else [available])], default=None)
    transparent = "available" if system.offers_huge_pages() else "not available"
    return (
        f"{'?' if room is None else f'{room / 2**30:.1f}'} GiB available; transparent huge pages "
        f"{transparent}; {reserved.free} reserved huge pages of {reserved.size >> 20} MiB free"
    )


def _encodings() -> str:
    """How host pages can be encoded, and what that gains."""
    gains = " or ".join(f"{bits:g}" for bits in WIDTHS)
    if not native.driver_version():
        where = "the CPU only: there is no CUDA driver"
    elif _kernels().is_fault:
        where = "the CPU only: there are no CUDA kernels for this driver"
    else:
        where = "the CPU and CUDA"
    return f"raw; lossless, {gains} instead of 16 bits for each bfloat16, on {where}"


def _accelerator() -> dict[str, Finding]:
    """An accelerator that PyTorch drives, if this process has one."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or is_native(accelerator.type):
        return {}
    return {f"device {accelerator.type}": Finding("driven by PyTorch")}


def report() -> dict[str, Finding]:
    """What the installation has, by topic."""
    cuda, hip = torch.version.cuda, torch.version.hip
    platform = f"CUDA {cuda}" if cuda else f"HIP {hip}" if hip else "without CUDA"
    gpus = _gpus()
    return {
        "library": Finding(str(native.__file__)),
        "PyTorch": Finding(f"{torch.__version__} ({platform})"),
        "CUDA driver": _driver(),
        "GPUs": Finding(str(torch.cuda.device_count())),
        **{f"GPU {address}": _gpu(address, model) for address, model in gpus.items()},
        "CUDA kernels": _kernels(),
        "scattered copies": _scattered_copies(),
        **_accelerator(),
        "encodings": Finding(_encodings()),
        "copy costs": _copy_method_costs(gpus.values()),
        "host memory": Finding(_host_memory()),
        "vLLM": _engine("vllm", vllm.is_tested, " or ".join(vllm.TESTED_VERSIONS)),
        "transformers": _engine("transformers", transformers.is_known, transformers.KNOWN),
    }


def main(arguments: list[str]) -> int:
    """Runs the command.

    Returns:
        int: the exit code; 1 if something is at fault.
    """
    parser = argparse.ArgumentParser("python -m torch_kvswap doctor", description=__doc__)
    parser.add_argument("--json", action="store_true", help="for programs and bug reports")
    as_json = parser.parse_args(arguments).json
    found = report()
    if as_json:
        print(json.dumps({topic: finding._asdict() for topic, finding in found.items()}, indent=1))
    else:
        for topic, finding in found.items():
            print(f"{topic + ':':18}{'FAULT: ' if finding.is_fault else ''}{finding.text}")
    return int(any(finding.is_fault for finding in found.values()))
