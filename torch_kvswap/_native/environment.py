"""The environment variables whose names begin with KVSWAP_ (docs/environment.md)."""

from __future__ import annotations

import os
from difflib import get_close_matches

from torch_kvswap._native.log import log

_PREFIX = "KVSWAP_"
_LIBRARY = ("BATCH", "CHECK_ADDRESSES", "COPY_METHOD", "LATE_CPU")
_BUILD = ("CUDA", "TORCH_INDEX", "WERROR")
_TESTS = ("FUZZ_", "REPORTS", "REQUIRE_GPU", "SUITES", "TEST_")  # and longer ones


def warn_of_unknown() -> None:
    """Warns of variables that nothing reads, such as misspelled ones."""
    for name in sorted(os.environ):
        rest = name.removeprefix(_PREFIX)
        if rest == name or rest in _LIBRARY + _BUILD or rest.startswith(_TESTS):
            continue
        near = get_close_matches(rest, _LIBRARY + _BUILD, 1)
        known = ", ".join(_PREFIX + one for one in _LIBRARY)
        log.warning(
            "the environment has %s, which torch_kvswap does not read; %s",
            *(name, f"did you mean {_PREFIX}{near[0]}?" if near else f"it reads {known}"),
        )
