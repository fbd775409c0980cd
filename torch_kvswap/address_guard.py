"""Whether the tensors of a cache still have the memory that they had."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from torch_kvswap._native import loader
from torch_kvswap.layout import PagedLayout

_native = loader.library()
_has_moved, _release = _native.kvswap_cache_moved, _native.kvswap_cache_release


class Watch:
    """Looks at the tensors of some layouts before each submission.

    `.data =`, `set_()`, `resize_()` of the tensor or of its storage, and `share_memory_()` give a
    tensor other memory and tell nobody; only `set_()` and `resize_()` count its version up. So
    every address and the size of every storage are read every time (a storage that shrank twice
    may be back at its address): by the native side, from references of its own, in nanoseconds a
    tensor, where `Tensor.data_ptr` takes 70. Does not keep the memory when it is dropped.
    """

    def __init__(self, layouts: Sequence[PagedLayout]) -> None:
        self._layouts = layouts
        tensors = [tensor for layout in layouts for tensor in layout.tensors]
        addresses = [address for layout in layouts for address in layout.addresses]
        ends = [end for layout in layouts for end in layout.storage_ends]
        watch_cache = loader.ops.torch_kvswap._watch_cache
        self._native: int = watch_cache(tensors, addresses, ends)
        # Not at exit: other threads may still submit.
        weakref.finalize(self, _release, self._native).atexit = False

    def check(self) -> None:
        """Raises RuntimeError, which names the tensor, when one has moved."""
        if _has_moved(self._native):
            for layout in self._layouts:
                layout.check_unmoved()
