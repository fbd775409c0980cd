"""A second tier below the host pages of a PrefixCache: stores of pages, and the format of a page.

Public: `PageStore`, from which a store of your own is derived; `FileStore`, a folder;
`ValkeyStore`, a server; `MooncakeStore`, the memory of several machines.
"""

from torch_kvswap.below.files import FileStore
from torch_kvswap.below.mooncake import MooncakeStore
from torch_kvswap.below.store import PageStore
from torch_kvswap.below.valkey import ValkeyStore

__all__ = ["FileStore", "MooncakeStore", "PageStore", "ValkeyStore"]
