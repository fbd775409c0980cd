"""Measures the costs of the copy methods on this machine."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from statistics import median

import torch

from torch_kvswap.copy_method import DIRECTIONS, SMALLEST_FRAGMENT, CopyMethodCosts, Costs
from torch_kvswap.handler import AFTER_NOTHING, OffloadHandler
from torch_kvswap.host_pool.pool import HostPool
from torch_kvswap.layout import PagedLayout

SIZES = tuple(SMALLEST_FRAGMENT << power for power in range(13))  # of fragments, in bytes
# Without "kernel" for stores: a kernel that writes to the host nearly stops the compute beside it.
COPY_METHODS = {
    "store": ("strided", "batch", "staged"),
    "load": ("strided", "batch", "staged", "kernel"),
}
_SAMPLES = 5  # after one warm-up
_BLOCK_BYTES, _TRANSFER_BYTES, _MOST_BLOCKS = 2 << 20, 24 << 20, 64

_FASTEST = 0.97  # no fragment is predicted to take less than this share of its time on the link

# Measures the seconds of a transfer: copy method, direction, fragment bytes, slabs, blocks.
Seconds = Callable[[str, str, int, int, int], float]


def calibrate(seconds: Seconds, progress: Callable[[], object] = lambda: None) -> Costs:
    """Computes the costs of all copy methods from measured transfers.

    Args:
        seconds: measures one transfer, such as Machine.seconds().
        progress: called STEPS times.

    Returns:
        Costs: by direction, then by copy method.
    """
    times = {}
    for size, slabs, blocks in _SHAPES:
        for direction in DIRECTIONS:
            for copy_method in COPY_METHODS[direction]:
                one = seconds(copy_method, direction, size, slabs, 1)
                more = seconds(copy_method, direction, size, slabs, blocks) - one
                times[direction, copy_method, size, slabs] = one, max(more, 0.0) / (blocks - 1)
                progress()
    return {
        direction: {
            copy_method: _costs(
                {
                    key[2:]: time
                    for key, time in times.items()
                    if key[:2] == (direction, copy_method)
                },
                _link(direction, times),
            )
            for copy_method in COPY_METHODS[direction]
        }
        for direction in DIRECTIONS
    }


def _link(direction: str, times: Mapping[tuple[str, str, int, int], tuple[float, float]]) -> float:
    """Seconds per byte of the fastest copy method with the largest fragments."""
    size, slabs = SIZES[-1], _slabs(SIZES[-1])
    blocks = (
        times[direction, copy_method, size, slabs][1] for copy_method in COPY_METHODS[direction]
    )
    return min(blocks) / (size * slabs)


def _costs(times: Mapping[tuple[int, int], tuple[float, float]], link: float) -> CopyMethodCosts:
    """Fits the costs of one copy method.

    Args:
        times: (fragment bytes, slabs) to (seconds of one block, seconds of each further block).
        link: seconds per byte of the link.
    """
    # A block takes block + slabs * fragment seconds. Two numbers of slabs give both unknowns.
    few, many = times[_SPLIT_SIZE, _FEW][1], times[_SPLIT_SIZE, _slabs(_SPLIT_SIZE)][1]
    share = _FEW / _slabs(_SPLIT_SIZE)
    block = (few - share * many) / (1 - share)
    # No fragment is much faster than the link. Disturbed measurements may suggest otherwise.
    least = _FASTEST * link
    block = min([block, *(more - least * math.prod(key) for key, (_, more) in times.items())])
    block = max(block, 0.0)
    fragment = {
        size: max(times[size, _slabs(size)][1] - block, 0.0) / _slabs(size) for size in SIZES
    }
    start = median(one - more for one, more in times.values())
    return CopyMethodCosts(max(start, 0.0), block, fragment)


def _slabs(size: int) -> int:
    return max(2, min(64, _BLOCK_BYTES // size))


def _blocks(size: int) -> int:
    return max(2, min(_MOST_BLOCKS, _TRANSFER_BYTES // (size * _slabs(size))))


# With either number of slabs, a block keeps the link busy for longer than a copy takes to start.
_SPLIT_SIZE, _FEW = 4096, 32
_SHAPES = [(size, _slabs(size), _blocks(size)) for size in SIZES]
_SHAPES.append((_SPLIT_SIZE, _FEW, _MOST_BLOCKS))
STEPS = len(_SHAPES) * sum(map(len, COPY_METHODS.values()))


class Machine:
    """Measures transfers on a device, which should be otherwise idle.

    Allocates 48 MiB on the device, and up to as much on the host.

    Args:
        device (torch.device): a CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._bytes = torch.zeros(2 * _TRANSFER_BYTES, dtype=torch.uint8, device=device)
        self._shape: tuple[int, int] | None = None
        self._handlers: dict[str, OffloadHandler] = {}

    def seconds(
        self, copy_method: str, direction: str, size: int, slabs: int, blocks: int
    ) -> float:
        """Measures a transfer with scattered ids, from the call until the host sees its end.

        Args:
            copy_method (str): see copy_method.CHOICES.
            direction (str): "store" or "load".
            size (int): bytes per fragment.
            slabs (int): fragments per block.
            blocks (int): blocks per transfer.

        Returns:
            float: seconds of the fastest of several transfers, because disturbances only add time.
        """
        handler = self._handler(copy_method, size, slabs)
        count = handler.layouts[0].num_blocks
        samples = []
        for _ in range(_SAMPLES + 1):
            block_ids, page_ids = (torch.randperm(count)[:blocks].tolist() for _ in range(2))
            start = time.perf_counter()
            if direction == "store":
                job = handler.store(gpu_block_ids=block_ids, page_ids=page_ids, after=AFTER_NOTHING)
            else:
                job = handler.load(page_ids=page_ids, gpu_block_ids=block_ids, after=AFTER_NOTHING)
            handler.synchronize(job)
            samples.append(time.perf_counter() - start)
            handler.poll()
        return min(samples[1:])

    def close(self) -> None:
        """Closes the handlers and pools; seconds() makes new ones."""
        for handler in self._handlers.values():
            handler.close()
        for pool in {id(h.pools[0]): h.pools[0] for h in self._handlers.values()}.values():
            pool.close()
        self._handlers.clear()

    def _handler(self, copy_method: str, size: int, slabs: int) -> OffloadHandler:
        if (size, slabs) != self._shape:
            self.close()
            self._shape = size, slabs
            blocks = min(len(self._bytes) // (size * slabs), 4 * _MOST_BLOCKS)
            whole = self._bytes[: slabs * blocks * size].view(slabs, blocks, size)
            self._layout = PagedLayout(list(whole))
            self._pool = HostPool(self._layout, blocks)
        if copy_method not in self._handlers:
            self._handlers[copy_method] = OffloadHandler(
                self._layout, self._pool, copy_method=copy_method
            )
        return self._handlers[copy_method]
