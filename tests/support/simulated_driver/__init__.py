"""A CUDA driver in host memory, whose work runs when the test wants it.

Loading it replaces the driver for the whole process. Tests therefore run on it in other processes,
with a PyTorch without CUDA: a :func:`simulated` test in a process that many tests share, and that is
reset before each, :func:`run` in a process of its own. "Device" memory is host memory, and a stream
is a queue of operations. A test holds one up with `driver.hold()`, a kernel that does not end, and
looks at what goes on meanwhile: the first test of tests/sim/test_channel.py is an example.

In the mode "immediate", the default, each driver call runs everything that can run. In "manual"
operations run in run() and step(), and synchronising calls run only what they wait for. In
"threaded" a thread runs operations of random streams, from a given seed. Handlers use kernels only
if a test passes copy_method.

A test fails after a warning that it does not collect with logged(), and after what CUDA accepts
although it is a mistake: a wait for an event that was never recorded, freeing memory that pending
operations use or that was freed before, a copy between GPUs whose access was not enabled. A
deadlock aborts the process and prints all pending operations.

Not modelled, so tested in tests/gpu/: speed; torn and reordered writes; the limit of the driver's
queue; the implicit order of the legacy default stream; the driver's staging of pageable copies;
bounds of allocations (make test-asan, compute-sanitizer); asynchronous errors of kernels; CUDA's
capture calls; PyTorch's CUDA allocator, streams and events.
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
