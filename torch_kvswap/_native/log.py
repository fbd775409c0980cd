"""The library's logger."""

import functools
import logging

log = logging.getLogger("torch_kvswap")


@functools.cache
def warn_once(text: str) -> None:
    """Logs a warning, once in a process."""
    log.warning(text)
