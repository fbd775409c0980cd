"""The environment variables whose names begin with KVSWAP_ (docs/environment.md)."""

from __future__ import annotations

import os
from difflib import get_close_matches

from torch_kvswap._native.log import log

_PREFIX = "KVSWAP_"
_LIBRARY = ("CHECK_ADDRESSES", "LATE_CPU")  # switches
_BUILD = ("CUDA", "TORCH_INDEX", "WERROR")
_TESTS = ("FUZZ_", "REPORTS", "REQUIRE_GPU", "SUITES", "TEST_")  # and longer ones


def warn_of_wrong() -> None:
    """Warns of variables that nothing reads, such as misspelled ones, and of wrong switches.

    Whatever reads a wrong value raises; but not every program reads each variable.
    """
    for name, value in sorted(os.environ.items()):
        rest = name.removeprefix(_PREFIX)
        if rest != name and rest in _LIBRARY and value not in ("", "0", "1"):
            log.warning("%s is %r; it must be 0 or 1", name, value)
        if rest == name or rest in _LIBRARY + _BUILD or rest.startswith(_TESTS):
            continue
        near = get_close_matches(rest, _LIBRARY + _BUILD, 1)
        known = ", ".join(_PREFIX + one for one in sorted(_LIBRARY))
        log.warning(
            "the environment has %s, which torch_kvswap does not read; %s",
            *(name, f"did you mean {_PREFIX}{near[0]}?" if near else f"it reads {known}"),
        )
