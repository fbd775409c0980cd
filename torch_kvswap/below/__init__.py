"""A second tier below the host pages of a PrefixCache: stores of pages, and the format of a page.

Public: `PageStore`, what a store must have, and `FileStore`, a folder of files.
"""

from torch_kvswap.below.files import FileStore
from torch_kvswap.below.store import Completion, PageStore

__all__ = ["Completion", "FileStore", "PageStore"]
