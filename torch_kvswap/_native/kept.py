"""What must outlive its owner, because a device may be using its memory."""

from __future__ import annotations

from torch_kvswap._native.loader import native

_kept: set[object] = set()
# Module globals go while Python exits, when a copy may still run.
native.never_free(_kept)

# An object is kept before its memory is used, and let go when that has ended. An exception in
# between, also one that a finalizer loses, leaves it here: its memory is never freed then.
keep, let_go = _kept.add, _kept.discard
