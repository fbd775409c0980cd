"""Tables of what fragments cost, for CopyMethodCosts."""

from __future__ import annotations

from torch_kvswap.copy_method import SIZES, CopyMethodCosts


def proportional(seconds: float) -> dict[int, float]:
    """This for a fragment of 512 bytes, and as much for each byte of larger ones."""
    return {size: seconds * size / SIZES[0] for size in SIZES}


def seconds_of(costs: CopyMethodCosts, blocks: int, slabs: int, size: int) -> float:
    """A transfer of so many blocks with `slabs` fragments of `size` bytes each, one of SIZES."""
    return costs.start + blocks * costs.block + blocks * slabs * costs.fragment[size]
