"""The control of the demo: a comparison that passes whatever was loaded proves nothing."""

from torch import Tensor

from serving_demo.request import Request
from serving_demo.swapper import Swapper


class Control:
    """Zeroes one block of the first request that is loaded, behind each of its loads and before
    anything reads the block. `request` is None as long as nothing was loaded."""

    def __init__(self, swapper: Swapper, cache: list[Tensor]) -> None:
        self.request: Request | None = None
        self._swapper = swapper
        self._cache = cache

    def zero(self, request: Request) -> None:
        if self.request not in (None, request):
            return
        self.request = request
        self._swapper.order_behind_load(request)
        for kv_cache in self._cache:
            kv_cache[:, request.blocks[0]] = 0
