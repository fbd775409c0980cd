"""A CUDA driver in host memory, whose work runs when the test wants it.

Loading it replaces the driver for the whole process. Tests therefore run on it in other processes,
with a PyTorch without CUDA: a :func:`simulated` test in a process that many tests share, :func:`run`
in a process of its own.
"""

from simulated_driver.driver import DEVICE, HOST, Driver
from simulated_driver.libraries import build
from simulated_driver.paged import cache, on_device, place, pool
from simulated_driver.program import error_of, run
from simulated_driver.simulated import simulated, without_cuda

__all__ = [
    "DEVICE",
    "HOST",
    "Driver",
    "build",
    "cache",
    "error_of",
    "on_device",
    "place",
    "pool",
    "run",
    "simulated",
    "without_cuda",
]
