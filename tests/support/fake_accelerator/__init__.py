"""An accelerator of threads in host memory, on which tests run what is for any device of PyTorch.

It is PyTorch's PrivateUse1 device, named `fakeaccel`: `torch.Stream`, `torch.Event`, pinned memory
and `torch.accelerator` work as on hardware. Loading it changes what PyTorch says in the whole
process, so tests run on it in another one: see :func:`on_fake_accelerator`.
docs/fake_accelerator.md says what it models.
"""

from fake_accelerator.accelerator import DEVICE_TYPE, Accelerator, Counters, Hold, load
from fake_accelerator.library import build
from fake_accelerator.tests import as_rocm, needs_compiler, on_fake_accelerator

__all__ = [
    "DEVICE_TYPE",
    "Accelerator",
    "Counters",
    "Hold",
    "as_rocm",
    "build",
    "load",
    "needs_compiler",
    "on_fake_accelerator",
]
