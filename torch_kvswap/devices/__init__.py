"""Devices that only torch can drive, and what their vendors add.

Public: what the package of a vendor implements and calls.
"""

from torch_kvswap.devices.backend import DeviceBackend, register_device_backend

__all__ = ["DeviceBackend", "register_device_backend"]
