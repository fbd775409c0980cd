"""Which layouts share memory, so that the same id is the same block in both."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from torch_kvswap.layout import Int64Array, Planes


def block_spaces(layouts: Sequence[Planes]) -> list[int]:
    """A number for each layout, equal for those that share blocks.

    Hybrid models let several groups of layers use the same tensors in turn: a block of one group
    was, some time before, a block of another. Raises ValueError for layouts that share memory in
    another way.
    """
    spaces = list(range(len(layouts)))
    for later, layout in enumerate(layouts):
        for earlier, other in enumerate(layouts[:later]):
            shifts = _shifts(other, layout)
            if not shifts.size:
                continue
            if shifts.any():
                raise ValueError(
                    f"layouts {earlier} and {later} share memory, but the same id is not the same "
                    "block in both; make them of the same rows with the same distance"
                )
            joined, left = spaces[earlier], spaces[later]
            spaces = [joined if space == left else space for space in spaces]
    return spaces


def _shifts(one: Planes, other: Planes) -> Int64Array:
    """For each pair of planes that share bytes: by how many blocks `other` is ahead; 1 where the
    distances between blocks differ."""
    ahead = np.subtract.outer(other.bases, one.bases)
    one_extent = (one.num_blocks - 1) * one.strides + one.sizes
    other_extent = (other.num_blocks - 1) * other.strides + other.sizes
    meet = (ahead < one_extent) & (-ahead < other_extent[:, None])
    same_stride = np.equal.outer(other.strides, one.strides)
    # Rows of planes that lie side by side take turns, and share no byte.
    blocks, offset = np.divmod(ahead, one.strides)
    inside = offset < one.sizes
    reaches_next = offset + other.sizes[:, None] > one.strides
    shared = meet & (~same_stride | inside | reaches_next)
    shift: Int64Array = np.where(same_stride, np.where(inside, blocks, blocks + 1), 1)[shared]
    return shift
