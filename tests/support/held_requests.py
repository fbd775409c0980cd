"""Requests whose blocks the host keeps, as an engine resumes them."""

from __future__ import annotations

from typing import Any

from torch_kvswap import PrefixCache
from torch_kvswap.prefix import Stored


def resume(prefixes: PrefixCache, held: Stored, keys: Any, blocks: Any) -> str:
    """Loads all blocks of a request. Ends the hold unless the answer is "pending"."""
    assert held.lease is not None
    is_pending = prefixes.lookup(keys, again=True).pending > 0
    job = prefixes.load(keys, blocks)
    if job is None and is_pending:
        return "pending"
    held.lease.let_go()
    return "lost" if job is None else "loaded"
