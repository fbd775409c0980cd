"""Copy methods: what the caller can choose."""

from __future__ import annotations

from torch_kvswap._native.arguments import read_int, read_name
from torch_kvswap._native.loader import native

COPY_METHODS = tuple(native.copy_methods())
AUTO, COPY_ENGINES = "auto", "copy_engines"  # the latter chooses without kernels
CHOICES = (AUTO, COPY_ENGINES, *(method for method in COPY_METHODS if method != "host"))
DEFAULT_STAGING_BYTES = 256 << 20


def copy_method_options(copy_method: str, staging_bytes: int) -> native.CopyMethodOptions:
    """The options of a native handler that choose the copy method, from those of OffloadHandler.

    Raises:
        TypeError: staging_bytes is not an integer.
        ValueError: the method does not exist, or staging_bytes is negative.
    """
    copy_method = read_name("copy_method", copy_method, CHOICES)
    setting = f"copy_method={copy_method!r}"
    number = -1 if copy_method in (AUTO, COPY_ENGINES) else COPY_METHODS.index(copy_method)
    staging_bytes = read_int("staging_bytes", staging_bytes)
    return native.CopyMethodOptions(number, copy_method == COPY_ENGINES, setting, staging_bytes)
