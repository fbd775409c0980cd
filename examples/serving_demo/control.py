"""The demo's negative control: a corrupted load must change the tokens."""

from torch import Tensor

from serving_demo.request import Request
from serving_demo.swapper import Swapper


class Control:
    """Zeroes one block of the first request that is loaded, after each of its loads.

    Attributes:
        request (Request | None): that request; None if nothing was loaded.
    """

    def __init__(self, swapper: Swapper, cache: list[Tensor]) -> None:
        self.request: Request | None = None
        self._swapper = swapper
        self._cache = cache

    def zero(self, request: Request) -> None:
        """Zeroes the first block of the request on the current stream, behind its load."""
        if self.request not in (None, request):
            return
        self.request = request
        self._swapper.order_behind_load(request)
        for kv_cache in self._cache:
            kv_cache[:, request.blocks[0]] = 0
