"""A second tier below the host pages of a PrefixCache: stores of pages, and the format of a page.

Public: `PageStore`, what a store must have; `FileStore`, a folder; `ValkeyStore`, a server;
`MooncakeStore`, the memory of several machines; `BlockingStore`, which makes a store of four
methods.
"""

from torch_kvswap.below.blocking import BlockingStore
from torch_kvswap.below.files import FileStore
from torch_kvswap.below.mooncake import MooncakeStore
from torch_kvswap.below.store import Completion, PageStore
from torch_kvswap.below.valkey import ValkeyStore

__all__ = ["BlockingStore", "Completion", "FileStore", "MooncakeStore", "PageStore", "ValkeyStore"]
