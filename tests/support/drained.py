"""Waits for jobs, whatever becomes of them."""

from __future__ import annotations

from contextlib import suppress

from torch_kvswap import OffloadHandler, PrefixCache, TransferError


def drain(handler: OffloadHandler | PrefixCache) -> None:
    """Blocks until every job has ended, done or not."""
    with suppress(TransferError):
        handler.synchronize()
