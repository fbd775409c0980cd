"""What must outlive its owner, because a device may be using its memory."""

from __future__ import annotations

from torch_kvswap._native.loader import native

_alive: set[object] = set()
# Module globals go while Python exits, when a copy may still run.
native.never_free(_alive)

# An object is added before its memory is used, and may be freed when that has ended. After an
# exception in between, also one that a finalizer loses, it stays: its memory is never freed.
keep_alive, allow_free = _alive.add, _alive.discard
