"""Report what this installation can do on this machine.

Does not initialise CUDA, so it does not disturb other processes.
"""

from __future__ import annotations

import argparse
import re

import torch

from torch_kvswap._native.loader import native
from torch_kvswap.copy_method import read_costs
from torch_kvswap.devices.backend import is_native
from torch_kvswap.devices.capabilities import capabilities
from torch_kvswap.encoding.slot import WIDTHS
from torch_kvswap.host_pool import system

_MISSING = "so nothing is staged, and expand_block_ids takes CPU ids only"


def _release(version: int) -> str:
    """A version number as text: 12080 is "CUDA 12.8"."""
    return f"CUDA {version // 1000}.{version % 1000 // 10}"


def _driver() -> str:
    version = native.driver_version()
    if not version:
        return f"none: {native.driver_error()}"
    return _release(version)


def _kernels() -> str:
    runtime, driver = native.kernel_version(), native.driver_version()
    if not runtime:
        return f"none: built without nvcc, {_MISSING}"
    if driver and driver // 1000 < runtime // 1000:
        return (
            f"built with {_release(runtime)}, too new for the driver, {_MISSING}; update the "
            "driver or build with an older nvcc"
        )
    return f"built with {_release(runtime)}"


def _scattered_copies() -> str:
    if not native.driver_version():
        return "no driver: host memory only"
    if not native.driver_has_batch():
        return "one call per fragment: the driver is older than CUDA 12.8"
    try:
        limit = native.batch_limit()
    except (RuntimeError, ValueError) as error:
        return f"none: {error}"
    if limit == 0:
        return "one call per fragment: KVSWAP_BATCH=0"
    return f"cuMemcpyBatchAsync, {limit} fragments a call"


def _copy_method_costs() -> str:
    """The source of the copy-method costs for each GPU model in the system."""
    files = sorted(system.ROOT.glob("proc/driver/nvidia/gpus/*/information"))
    found = (re.search(r"^Model:\s*(.+?)\s*$", file.read_text(), re.M) for file in files)
    models = sorted({model[1] for model in found if model})
    try:
        sources = [f"{read_costs(model).source} ({model})" for model in models]
    except ValueError as error:
        return f"none: {error}"
    return ", ".join(sources) or "unknown: the system names no GPU"


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
    if capabilities("cuda").kernels:
        where = "the CPU and CUDA"
    elif not native.driver_version():
        where = "the CPU only: there is no CUDA driver"
    else:
        where = "the CPU only: there are no CUDA kernels for this driver"
    return f"raw; lossless, {gains} instead of 16 bits for each bfloat16, on {where}"


def _devices() -> dict[str, str]:
    """What each type of device has that this process may use."""
    types = {"cuda"} if is_native("cuda") and native.driver_version() else set()
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is not None:
        types.add(accelerator.type)
    return {f"device {kind}": str(capabilities(kind)) for kind in sorted(types)}


def report() -> dict[str, str]:
    """What the installation has, by topic."""
    cuda, hip = torch.version.cuda, torch.version.hip
    platform = f"CUDA {cuda}" if cuda else f"HIP {hip}" if hip else "without CUDA"
    return {
        "library": str(native.__file__),
        "PyTorch": f"{torch.__version__} ({platform})",
        "CUDA driver": _driver(),
        "GPUs": str(torch.cuda.device_count()),
        "CUDA kernels": _kernels(),
        "scattered copies": _scattered_copies(),
        **_devices(),
        "encodings": _encodings(),
        "copy costs": _copy_method_costs(),
        "host memory": _host_memory(),
    }


def main(arguments: list[str]) -> int:
    """Runs the command and returns its exit code."""
    argparse.ArgumentParser("python -m torch_kvswap doctor", description=__doc__).parse_args(
        arguments
    )
    for topic, text in report().items():
        print(f"{topic + ':':18}{text}")
    return 0
