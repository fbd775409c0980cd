"""Say what this installation can do on this machine.

Does not initialise CUDA, so it may run beside anything.
"""

from __future__ import annotations

import argparse
import ctypes
import os

import torch

from torch_kvswap import _extension


def _driver(library: ctypes.CDLL) -> str:
    version = library.kvswap_driver_version()
    if version:
        return f"CUDA {version // 1000}.{version % 1000 // 10}"
    return f"none: {library.kvswap_driver_error().decode()}"


def _batch_call(library: ctypes.CDLL) -> str:
    if not library.kvswap_driver_version():
        return "no driver: host memory only"
    if not library.kvswap_driver_has_batch():
        return "one call per fragment: the driver is older than CUDA 12.8"
    if os.environ.get("KVSWAP_BATCH") == "0":
        return "one call per fragment: KVSWAP_BATCH=0"
    limit = os.environ.get("KVSWAP_BATCH_LIMIT") or "8192"
    return f"cuMemcpyBatchAsync, {limit} fragments a call"


def _kernels(library: ctypes.CDLL) -> str:
    if library.kvswap_has_kernels():
        return "built in"
    return "none: built without nvcc, so expand_block_ids takes CPU ids only"


def report() -> dict[str, str]:
    """What the installation has, by topic."""
    library = _extension.library()
    cuda = torch.version.cuda
    return {
        "library": str(library._name),
        "PyTorch": f"{torch.__version__} ({f'CUDA {cuda}' if cuda else 'without CUDA'})",
        "CUDA driver": _driver(library),
        "GPUs": str(torch.cuda.device_count()),
        "CUDA kernels": _kernels(library),
        "scattered copies": _batch_call(library),
    }


def main(arguments: list[str]) -> int:
    argparse.ArgumentParser("python -m torch_kvswap doctor", description=__doc__).parse_args(
        arguments
    )
    for topic, text in report().items():
        print(f"{topic + ':':18}{text}")
    return 0
