"""What the library can do on each kind of device."""

from __future__ import annotations

from dataclasses import dataclass, fields

from torch_kvswap._native.loader import native
from torch_kvswap.devices.backend import can_pin, find_device_backend, is_native


@dataclass(frozen=True)
class Capabilities:
    """What the library can do on devices of one type. Asking does not initialise the devices.

    A method or call that needs what is missing is never chosen, and refused if it is asked for.

    Attributes:
        batched_copies (bool): one call copies many fragments: copy_method="batch".
        strided_copies (bool): one call copies a block of all layers: copy_method="strided".
        kernels (bool): kernels of this library copy and encode: copy_method="staged" and "kernel",
            and pools with encoding="lossless".
        gates (bool): streams wait for words of memory: OffloadHandler.gate().
        host_registration (bool): host memory that exists can be pinned, in place of memory that
            torch allocates: shared pools, huge pages, NUMA nodes.
    """

    batched_copies: bool
    strided_copies: bool
    kernels: bool
    gates: bool
    host_registration: bool

    def __str__(self) -> str:
        names = {field.name.replace("_", " "): getattr(self, field.name) for field in fields(self)}
        has = [name for name, is_there in names.items() if is_there]
        lacks = [name for name, is_there in names.items() if not is_there]
        return "; ".join(
            f"{verb} {', '.join(some)}" for verb, some in (("has", has), ("lacks", lacks)) if some
        )


def capabilities(device_type: str) -> Capabilities:
    """What the library can do on devices of this type.

    Args:
        device_type (str): torch's name, such as "cuda" or "npu".
    """
    if device_type == "cpu":
        return Capabilities(False, False, False, False, False)
    if is_native(device_type):
        return Capabilities(
            batched_copies=native.driver_has_batch() and _has_batch_calls(),
            strided_copies=True,
            kernels=_has_kernels(),
            gates=native.driver_has_stream_words(),
            host_registration=True,
        )
    backend = find_device_backend(device_type)
    return Capabilities(
        batched_copies=backend is not None,
        strided_copies=False,
        kernels=False,
        gates=False,
        host_registration=can_pin(backend),
    )


def _has_kernels() -> bool:
    """Whether the library has kernels that the CUDA driver can load."""
    return 0 < native.kernel_version() // 1000 <= native.driver_version() // 1000


def _has_batch_calls() -> bool:
    """Whether the environment lets copies use the driver's batch call."""
    try:
        return native.batch_limit() > 0
    except (RuntimeError, ValueError):  # `doctor` says what is wrong in the environment
        return False
