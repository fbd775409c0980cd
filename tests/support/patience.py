"""How long tests wait for what has to come: so much longer than it takes that only a hang is told.

No test is right because something was fast enough. A test that waits polls for the state that it
needs, until its patience ends; what must not happen is asked for when all that could do it has had
its turn.
"""

from __future__ import annotations

import os

SCALE = float(os.environ.get("KVSWAP_TEST_TIMEOUT_SCALE", "1"))  # a sanitizer takes its time
PATIENCE = 60 * SCALE  # seconds
