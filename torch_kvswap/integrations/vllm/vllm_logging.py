"""The library's log in a process of vLLM."""

from __future__ import annotations

import logging

from torch_kvswap._native.log import log


def write_where_vllm_does() -> None:
    """Gives the library's logger the handlers and the level of vLLM's, which each of its processes
    configures when it starts. Otherwise INFO is lost, and warnings have neither time nor rank. A
    logger that the program has configured stays as it is."""
    theirs = logging.getLogger("vllm")
    if log.hasHandlers() or not theirs.handlers:
        return
    log.handlers[:], log.propagate = theirs.handlers, False
    if log.level == logging.NOTSET:
        log.setLevel(theirs.level)
