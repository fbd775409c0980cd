"""Measures the costs of the copy methods on this machine."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import product
from statistics import median, quantiles
from typing import NamedTuple

import torch

from torch_kvswap.copy_method import (
    DIRECTIONS,
    CopyMethodCosts,
    Costs,
    gpu_name,
    shipped_costs,
)
from torch_kvswap.host_pool.pool import HostPool
from torch_kvswap.layout import PagedLayout, allocate_layers
from torch_kvswap.offload.handler import OffloadHandler

SIZES = tuple(512 << power for power in range(13))  # bytes per fragment
MEASURED = "strided", "batch", "staged", "kernel"
_SAMPLES = 5  # after one warm-up
_BLOCK_BYTES, _TRANSFER_BYTES, _MAX_BLOCKS = 2 << 20, 24 << 20, 64
_CACHE_BYTES = 2 * _TRANSFER_BYTES
_OWN_BYTES = 11 << 20  # PyTorch's CUDA allocator places smaller tensors together

_FASTEST = 0.97  # no fragment is predicted to take less than this share of its time on the link


class Seconds(NamedTuple):
    """What a transfer took.

    Attributes:
        total (float): seconds from the call until the host saw the end.
        submit (float): seconds in the call, whose thread submitted the transfer.
    """

    total: float
    submit: float


# Measures a transfer: copy method, direction, fragment bytes, slabs, blocks.
Measure = Callable[[str, str, int, int, int], Seconds]


class _Line(NamedTuple):
    """Seconds for the first block, and for each further one."""

    first: float
    more: float

    @classmethod
    def through(cls, first: float, all_: float, blocks: int) -> _Line:
        return cls(first, max(all_ - first, 0.0) / (blocks - 1))


_Lines = Mapping[tuple[int, int], _Line]  # keys: fragment bytes, slabs


def calibrate(measure: Measure, progress: Callable[[], object] = lambda: None) -> Costs:
    """Computes the costs of all copy methods from measured transfers.

    Args:
        measure: measures one transfer, such as Machine.measure().
        progress: called STEPS times.

    Returns:
        Costs: by direction, then by copy method.

    Raises:
        RuntimeError: transfers, or submitting them, seem to take no time.
    """
    kinds = list(product(DIRECTIONS, MEASURED))
    copying: dict[tuple[str, str], dict[tuple[int, int], _Line]] = {kind: {} for kind in kinds}
    submitting: dict[tuple[str, str], dict[tuple[int, int], _Line]] = {kind: {} for kind in kinds}
    for size, slabs, blocks in _SHAPES:
        for direction, copy_method in kinds:
            none, one, all_ = (
                measure(copy_method, direction, size, slabs, count) for count in (0, 1, blocks)
            )
            total = _Line.through(one.total, all_.total, blocks)
            # A call without blocks takes as long as one that leaves its job to another thread.
            submit = _Line.through(one.submit - none.submit, all_.submit - none.submit, blocks)
            copying[direction, copy_method][size, slabs] = total
            submitting[direction, copy_method][size, slabs] = submit
            progress()
    costs: Costs = {direction: {} for direction in DIRECTIONS}
    for direction, copy_method in kinds:
        link = min(_seconds_per_byte(copying[direction, of]) for of in MEASURED)
        own = _seconds_per_byte(copying[direction, copy_method])
        start, block, fragment = _fit(copying[direction, copy_method], link)
        submit_start, submit_copy = _fit_submission(submitting[direction, copy_method], copy_method)
        if own == 0 or submit_start == submit_copy == 0:
            what = "" if own == 0 else "submitting "
            raise RuntimeError(
                f"{what}a {direction} by copy_method={copy_method!r} seemed to take no time; "
                "nothing was kept. Calibrate again while the machine is idle"
            )
        costs[direction][copy_method] = CopyMethodCosts(
            start, block, submit_start, submit_copy, fragment
        )
    return costs


def _seconds_per_byte(lines: _Lines) -> float:
    """Seconds per byte with the largest fragments."""
    size, slabs = SIZES[-1], _slabs(SIZES[-1])
    return lines[size, slabs].more / (size * slabs)


def _fit(lines: _Lines, link: float) -> tuple[float, float, dict[int, float]]:
    """Fits the time of transfers: seconds per transfer, per block, and per fragment by its size.

    `link` is the seconds per byte of the link.
    """
    # A block takes block + slabs * fragment seconds. Two numbers of slabs give both unknowns.
    few, many = lines[_SPLIT_SIZE, _FEW].more, lines[_SPLIT_SIZE, _slabs(_SPLIT_SIZE)].more
    share = _FEW / _slabs(_SPLIT_SIZE)
    block = (few - share * many) / (1 - share)
    # No fragment is much faster than the link. Disturbed measurements may suggest otherwise.
    least = _FASTEST * link
    block = min([block, *(line.more - least * math.prod(key) for key, line in lines.items())])
    block = max(block, 0.0)
    fragment = {
        size: max(lines[size, _slabs(size)].more - block, 0.0) / _slabs(size) for size in SIZES
    }
    return _start(lines), block, fragment


def _fit_submission(lines: _Lines, copy_method: str) -> tuple[float, float]:
    """Fits the time that a thread takes to submit a transfer, roughly.

    A copy takes different times in different shapes: a fragment of a batch by its size, a staged
    page by the number of pieces. The middle of the quartiles, as a ratio, is right for most of
    them within a factor of two, and a few disturbed measurements do not change it much.

    Returns:
        tuple: seconds per transfer, and per copy as CopyMethodCosts.submit_copy counts them.
    """
    copies = (
        line.more / (slabs if copy_method == "batch" else 1) for (_, slabs), line in lines.items()
    )
    low, _, high = quantiles(copies, n=4)
    return _start(lines), math.sqrt(low * high)


def _start(lines: _Lines) -> float:
    return max(median(line.first - line.more for line in lines.values()), 0.0)


def _slabs(size: int) -> int:
    return max(2, min(64, _BLOCK_BYTES // size))


def _blocks(size: int) -> int:
    return max(2, min(_MAX_BLOCKS, _TRANSFER_BYTES // (size * _slabs(size))))


# With either number of slabs, a block keeps the link busy for longer than a copy takes to start.
_SPLIT_SIZE, _FEW = 4096, 32
_SHAPES = [(size, _slabs(size), _blocks(size)) for size in SIZES]
_SHAPES.append((_SPLIT_SIZE, _FEW, _MAX_BLOCKS))
STEPS = len(_SHAPES) * len(DIRECTIONS) * len(MEASURED)


class InlineHandler(OffloadHandler):
    """A handler whose calls submit their jobs themselves, whatever was measured before."""

    def __init__(self, layout: PagedLayout, pool: HostPool, copy_method: str) -> None:
        self._costs = {
            direction: {
                method: replace(costs, submit_start=0.0, submit_copy=0.0)
                for method, costs in of_direction.items()
            }
            for direction, of_direction in shipped_costs(gpu_name(layout.device)).costs.items()
        }
        super().__init__(layout, pool, copy_method=copy_method)


def _new_layout(
    device: torch.device, at_one_distance: bool, size: int, slabs: int, blocks: int
) -> PagedLayout:
    """A cache whose layers lie at one distance, or were allocated one by one.

    Strided copies are measured with the former. A strided copy of a single layer costs as much,
    except for its bytes, and the prediction counts the copies. The other methods are measured with
    the latter, where batches take up to 1.4 times as long (H200).
    """
    if at_one_distance:
        layers = allocate_layers((blocks, size), slabs, dtype=torch.uint8, device=device)
        return PagedLayout(layers)
    nbytes = blocks * size
    own = max(nbytes, _OWN_BYTES)
    one_by_one = (torch.zeros(own, dtype=torch.uint8, device=device) for _ in range(slabs))
    return PagedLayout([layer[:nbytes].view(blocks, size) for layer in one_by_one])


class Machine:
    """Measures transfers on a CUDA device, which should be otherwise idle.

    Allocates up to 752 MiB on the device, and up to 48 MiB on the host.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._shape: tuple[int, int] | None = None
        self._handlers: dict[str, OffloadHandler] = {}
        self._layouts: dict[bool, PagedLayout] = {}  # key: layers at one distance
        self._pool: HostPool | None = None

    def measure(
        self, copy_method: str, direction: str, size: int, slabs: int, blocks: int
    ) -> Seconds:
        """Measures a transfer with scattered ids that the calling thread submits.

        Returns the least of several transfers, because disturbances only add time.

        Raises:
            RuntimeError: another thread had to submit the transfer.
        """
        handler = self._handler(copy_method, size, slabs)
        count = handler.layouts[0].num_blocks
        samples = []
        for _ in range(_SAMPLES + 1):
            shuffled = (torch.randperm(count, device="cpu") for _ in range(2))
            block_ids, page_ids = (ids[:blocks].tolist() for ids in shuffled)
            start = time.perf_counter()
            if direction == "store":
                job = handler.store(gpu_block_ids=block_ids, page_ids=page_ids, after=())
            else:
                job = handler.load(page_ids=page_ids, gpu_block_ids=block_ids, after=())
            handler.synchronize(job)
            total = time.perf_counter() - start
            (result,) = handler.poll()
            if result.queue_seconds > 0:
                raise RuntimeError(
                    f"a {direction} by copy_method={copy_method!r} was queued, so the time of its "
                    "submission is not known"
                )
            samples.append(Seconds(total, result.submit_seconds))
        totals, submits = zip(*samples[1:], strict=True)
        return Seconds(min(totals), min(submits))

    def close(self) -> None:
        """Closes the handlers and pools; measure() makes new ones."""
        for handler in self._handlers.values():
            handler.close()
        if self._pool is not None:
            self._pool.close()
        self._handlers.clear()
        self._layouts.clear()
        self._pool = None

    def _handler(self, copy_method: str, size: int, slabs: int) -> OffloadHandler:
        if (size, slabs) != self._shape:
            self.close()
            self._shape = size, slabs
        if copy_method not in self._handlers:
            blocks = min(_CACHE_BYTES // (size * slabs), 4 * _MAX_BLOCKS)
            at_one_distance = copy_method == "strided"
            if at_one_distance not in self._layouts:
                layout = _new_layout(self._device, at_one_distance, size, slabs, blocks)
                self._layouts[at_one_distance] = layout
            layout = self._layouts[at_one_distance]
            if self._pool is None:
                self._pool = HostPool(layout, blocks)
            self._handlers[copy_method] = InlineHandler(layout, self._pool, copy_method)
        return self._handlers[copy_method]
