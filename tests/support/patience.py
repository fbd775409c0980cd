"""How long tests wait. A wait takes much longer than needed before it fails, so that it fails only
on a hang.

No test depends on speed. A test polls for the state that it needs until its patience ends. Before
it checks that something has not happened, it gives every thread that could do it the chance to.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

SCALE = float(os.environ.get("KVSWAP_TEST_TIMEOUT_SCALE", "1"))  # sanitizers make everything slower
PATIENCE = 60 * SCALE  # seconds


def in_time(condition: Callable[[], bool], seconds: float = PATIENCE) -> bool:
    """Polls until the condition holds and returns True, or False if it does not hold in time."""
    deadline, delay = time.monotonic() + seconds, 0.0002
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(delay)
        delay = min(1.1 * delay, 0.001)
    return True
