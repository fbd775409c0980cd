"""What must outlive its owner, because a device may be using its memory."""

from __future__ import annotations

import ctypes

_kept: set[object] = set()
# One reference too many: module globals go while Python exits, when a copy may still run.
ctypes.pythonapi.Py_IncRef(ctypes.py_object(_kept))

# An object is kept before its memory is used, and let go when that has ended. An exception in
# between, also one that a finalizer loses, leaves it here: its memory is never freed then.
keep, let_go = _kept.add, _kept.discard
