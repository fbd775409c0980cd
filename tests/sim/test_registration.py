"""Host memory is registered with the driver in pieces. A forked process has none of the
registrations.
"""

from __future__ import annotations

import torch
from simulated_driver import Driver, simulated

from torch_kvswap._native.loader import native
from torch_kvswap.host_pool.memory import Registration

GPU = torch.device("cuda", 0)


@simulated
def test_each_piece_is_registered_by_itself_and_the_driver_is_asked(driver: Driver) -> None:
    memory = torch.zeros(8192, dtype=torch.uint8)
    registration = Registration(memory, GPU)
    assert not registration.is_pinned()  # nothing is
    assert registration.add(0, 4096) is None
    assert native.is_pinned(0, memory.data_ptr())
    assert not native.is_pinned(0, memory.data_ptr() + 4096)
    assert registration.add(4096, 8192) is None
    assert registration.is_pinned()
    driver.cuda.check("cuMemHostUnregister", memory.data_ptr())  # behind its back
    assert not registration.is_pinned()
    driver.cuda.check("cuMemHostRegister", memory.data_ptr(), 4096, 1)
    registration.remove()
    assert not native.is_pinned(0, memory.data_ptr())
    assert driver.calls("cuMemHostUnregister") == 3
