"""What others reach, to be compared with.

Measured on one H200, the layers as slices of one tensor, every peer in the same process as one big
pinned copy of the same bytes: vLLM 0.33.0 (its CPU offloading, and SimpleCPUOffload), SGLang 0.5.23
(page_first), LMCache 0.5.6 (without and with staging) and the offloading of transformers 5.23.0.
SGLang's bulk-copy kernel is among them, although SGLang has no setting that uses it. "Warm": each
in a loop of its own. "Cold": all configurations in turn, so that the host's caches hold the code of
another one at each call; 2026-11-22. Then the bulk-copy kernel was measured at 64 blocks only.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Peer:
    """The fastest one for a kind of transfer. ratio: of its total time to that of the big copy.
    submit_us: host time in the call of the fastest one that a setting can choose."""

    ratio: float
    submit_us: float | None = None


@dataclass(frozen=True)
class BesideCompute:
    """What a graph of decode steps loses beside transfers of 160 x 8 KiB blocks by a peer."""

    name: str
    direction: str
    lost_ms_per_gb: float
    gb_per_s: float


_BLOCKS = (1, 8, 64, 512)
_WARM = {
    ("64x32", "store"): (2.4, 1.29, 1.09, 1.06),
    ("64x32", "load"): (2.5, 1.31, 1.11, 1.08),
    ("160x4", "store"): (3.8, 1.69, 1.15, 1.10),
    ("160x4", "load"): (4.2, 1.80, 1.18, 1.12),
    ("61x18", "store"): (3.1, 1.62, 1.15, 1.07),
    ("61x18", "load"): (3.4, 1.79, 1.13, 1.10),
    ("1x2048", "store"): (2.2, 1.23, 1.06, 1.03),
    ("1x2048", "load"): (2.0, 1.18, 1.06, 1.02),
}
_COLD = {
    ("64x32", "store"): ((2.20, 81), (1.33, 169), (1.14, 376), (1.06, 1354)),
    ("160x8", "store"): ((2.92, 99), (1.43, 162), (1.22, 383), (1.07, 1515)),
    ("160x8", "load"): ((2.55, 82), (1.54, 169), (1.32, 814), (1.30, 5741)),
    ("160x4", "store"): ((3.39, 91), (1.81, 179), (1.39, 812), (1.12, 1566)),
    ("160x4", "load"): ((3.20, 104), (1.99, 191), (1.49, 717), (1.19, 2563)),
    ("160x2", "store"): ((5.32, 139), (2.69, 169), (1.80, 365), (1.23, 1635)),
    ("160x2", "load"): ((4.73, 126), (2.90, 191), (1.90, 703), (1.75, 2731)),
    ("1x2048", "load"): ((2.05, 79), (1.45, 235), (1.11, 10), (1.04, 822)),
}
_BULK_KERNEL = {  # cold, 64 blocks
    ("160x8", "store"): 1.11,
    ("160x8", "load"): 1.14,
    ("160x4", "store"): 1.18,
    ("160x4", "load"): 1.20,
    ("160x2", "store"): 1.29,
    ("160x2", "load"): 1.30,
}
# Over two big copies at once; the bulk-copy kernel for fragments of 2 KiB, else SGLang.
_BOTH = {("160x2", 64): 1.72, ("160x2", 512): 1.40, ("160x4", 512): 1.51, ("61x18", 512): 1.44}

BESIDE_COMPUTE = (
    BesideCompute("vLLM", "store", 0.23, 10),
    BesideCompute("vLLM", "load", 3.89, 22),
    BesideCompute("SGLang", "store", 0.68, 50),
    BesideCompute("SGLang", "load", 3.24, 20),
    BesideCompute("bulk-copy kernel", "store", 12.9, 51),
    BesideCompute("bulk-copy kernel", "load", 1.56, 49),
)


def best_peer(
    layers: int, fragment_kib: int, direction: str, blocks: int, state: str
) -> Peer | None:
    """None for what was not measured. direction: "store", "load" or "both"."""
    shape = f"{layers}x{fragment_kib}"
    if direction == "both":
        ratio = _BOTH.get((shape, blocks))
        return Peer(ratio) if ratio and state == "cold" else None
    if blocks not in _BLOCKS:
        return None
    index, key = _BLOCKS.index(blocks), (shape, direction)
    if state == "cold":
        if key not in _COLD:
            return None
        ratio, submit_us = _COLD[key][index]
        bulk_kernel = _BULK_KERNEL.get(key, ratio) if blocks == 64 else ratio
        return Peer(min(ratio, bulk_kernel), submit_us)
    return Peer(_WARM[key][index]) if key in _WARM else None
