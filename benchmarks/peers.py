"""What the best of others reaches, to be compared with.

Total time of a transfer over that of one big pinned copy of its bytes, on one H200, all of them in
one run: vLLM 0.33.0 (its CPU offloading, and SimpleCPUOffload), SGLang 0.5.23 (page_first, and its
bulk-copy kernel), LMCache 0.5.6 (without and with staging) and the offloading of transformers
5.23.0. The least of these seven for each kind of transfer.
"""

from __future__ import annotations

from transfers import Kind

_BLOCKS = (1, 8, 64, 512)
_RATIOS = {
    ("64x32", "store"): (2.4, 1.29, 1.09, 1.06),
    ("64x32", "load"): (2.5, 1.31, 1.11, 1.08),
    ("160x4", "store"): (3.8, 1.69, 1.15, 1.10),
    ("160x4", "load"): (4.2, 1.80, 1.18, 1.12),
    ("61x18", "store"): (3.1, 1.62, 1.15, 1.07),
    ("61x18", "load"): (3.4, 1.79, 1.13, 1.10),
    ("1x2048", "store"): (2.2, 1.23, 1.06, 1.03),
    ("1x2048", "load"): (2.0, 1.18, 1.06, 1.02),
}


def best_peer(kind: Kind) -> float | None:
    """The ratio; None for a kind that was not measured."""
    shape = f"{kind.shape.layers}x{kind.shape.fragment_kib}"
    ratios = dict(zip(_BLOCKS, _RATIOS.get((shape, kind.direction), ()), strict=False))
    return ratios.get(kind.blocks)
