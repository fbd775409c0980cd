"""Reads `below=` of a PrefixCache, which names or is a store."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial

from torch_kvswap._native.arguments import kind_of
from torch_kvswap.below.files import FileStore
from torch_kvswap.below.mooncake import MooncakeStore
from torch_kvswap.below.store import PageStore
from torch_kvswap.below.valkey import ValkeyStore

_KNOWN = (
    "'file:PATH', 'valkey://HOST:PORT' (for Redis too), 'mooncake://HOST:PORT', or an object of a "
    "class derived from torch_kvswap.below.PageStore"
)
_OF_URLS = {"valkey": ValkeyStore, "mooncake": MooncakeStore}


def without_store(options: Sequence[str]) -> ValueError:
    """The error for options of a store where `below` names none."""
    return ValueError(
        f"{' and '.join(options)} without below: name a store, such as below='file:PATH', or leave "
        f"out {' and '.join(options)}"
    )


def read_store(below: str | os.PathLike[str] | PageStore) -> Callable[[], PageStore]:
    """What opens the store that `below` names, or is; a folder is made then. That raises OSError if
    the folder cannot be made, or is none.

    Raises:
        TypeError: it is neither a str, a path nor a PageStore.
        ValueError: no such kind of store is known, or the URL is none.
        ImportError: a package that the store needs is not installed.
    """
    if isinstance(below, os.PathLike):
        return partial(FileStore, os.fsdecode(below))
    if isinstance(below, str):
        kind, colon, place = below.partition(":")
        if kind == "file":
            if not place:
                raise ValueError(f"below is {below!r}, which names no folder; pass 'file:PATH'")
            if place.startswith("~") or (place.startswith("//") and not place.startswith("///")):
                # Not a folder named ~, and none at the root named as a host or a relative path.
                raise ValueError(
                    f"below is {below!r}, but a PATH has neither ~ nor a host; pass 'file:/FOLDER'"
                )
            return partial(FileStore, place)
        if kind in _OF_URLS:
            store = _OF_URLS[kind](below)
            return lambda: store
        if os.sep in kind or not colon:
            raise ValueError(f"below is {kind!r}; for a folder pass 'file:PATH' or a pathlib.Path")
        # Not all of it, which may have a password.
        raise ValueError(f"below is a store of the kind {kind!r}; pass {_KNOWN}")
    if not isinstance(below, PageStore):
        raise TypeError(f"below is {kind_of(below)}; pass {_KNOWN}")
    return lambda: below
