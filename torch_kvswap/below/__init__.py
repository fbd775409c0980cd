"""A second tier below the host pages of a PrefixCache: stores of pages, and the format of a page.

Public: `PageStore`, what a store must have; `FileStore`, a folder; `ValkeyStore`, a server.
"""

from torch_kvswap.below.files import FileStore
from torch_kvswap.below.store import Completion, PageStore
from torch_kvswap.below.valkey import ValkeyStore

__all__ = ["Completion", "FileStore", "PageStore", "ValkeyStore"]
