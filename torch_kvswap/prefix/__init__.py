"""Prefix caching: which blocks of prompts are on which host pages.

Public besides `torch_kvswap.PrefixCache` and `PrefixHasher`: the block manager, for engines that
submit transfers themselves, with what it takes and returns; what `store()`, `below_stats()` and the
hasher return (`Stored`, `BelowStats`, `PrefixKeys`).
"""

from torch_kvswap._C import Reservation
from torch_kvswap.prefix.block_groups import BlockGroup
from torch_kvswap.prefix.cache import Stored
from torch_kvswap.prefix.hashing import PrefixKeys
from torch_kvswap.prefix.manager import (
    BlockManager,
    BlockStats,
    Lookup,
)
from torch_kvswap.prefix.tier import BelowStats

__all__ = [
    "BelowStats",
    "BlockGroup",
    "BlockManager",
    "BlockStats",
    "Lookup",
    "PrefixKeys",
    "Reservation",
    "Stored",
]
