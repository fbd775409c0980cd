"""Host memory is registered with the driver in pieces. A forked process has none of the
registrations.
"""

from __future__ import annotations

import torch
from simulated_driver import Driver, simulated

from torch_kvswap._native.loader import native
from torch_kvswap.host_pool.memory import Registration, map_new

GPU = torch.device("cuda", 0)


@simulated
def test_each_piece_is_registered_by_itself_and_the_driver_is_asked(driver: Driver) -> None:
    mapping = map_new(8192, 4096, shared=False)
    registration, begin = Registration(mapping, GPU), mapping.address
    assert registration.add(0, 4096) is None
    assert native.pinned_until(0, begin + 5) == begin + 4096
    assert native.pinned_until(0, begin + 4096) == 0
    assert registration.add(4096, 8192) is None
    assert Registration.overlaps(begin + 8191, begin + 9000)
    registration.remove()
    assert native.pinned_until(0, begin) == 0
    assert not Registration.overlaps(begin, begin + 8192)
    assert driver.calls("cuMemHostUnregister") == 2
