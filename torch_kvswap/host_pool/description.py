"""What the bytes of a host page mean: processes read each other's pages only if this is equal."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from torch_kvswap.encoding.slot import Encoding
from torch_kvswap.host_pool.shape import PoolShape

# Of this description, of pages, and of what is stored with them. Another number makes all
# pages that were stored before unfindable, instead of misread.
FORMAT_VERSION = 4
_LONGEST = 200  # characters of a value in an error


def describe_page(
    tensors: Sequence[str],
    shape: PoolShape,
    encoding: Encoding,
    contents: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Describes a page, as JSON can hold it. Whoever reads pages of others compares all of it.

    Args:
        tensors (Sequence[str]): PagedLayout._describe() of the cache.
        shape (PoolShape), encoding (Encoding): of the pool.
        contents (dict[str, Any] | None): what else the bytes depend on, such as the model and
            the rank; None for pages of a pool, which does not know it.
    """
    return {
        "format": FORMAT_VERSION,
        "byte_order": sys.byteorder,
        **(contents or {}),
        "tensors": list(tensors),
        "blocks_per_page": shape.blocks_per_page,
        "slot_bytes": shape.slot_bytes,
        "parts": shape.parts,
        "encoding": encoding.name,
        "verify": shape.verify,
    }


def page_text(description: Mapping[str, Any]) -> str:
    """The description as JSON, with a line for each field and each tensor: people can diff it."""
    fields = []
    for name, value in description.items():
        text = json.dumps(value)
        if isinstance(value, list):
            text = "[\n  " + ",\n  ".join(map(json.dumps, value)) + "\n ]"
        fields.append(f" {json.dumps(name)}: {text}")
    return "{\n" + ",\n".join(fields) + "\n}\n"


def difference(here: Any, there: Any, names: tuple[str, str], field: str = "") -> str | None:
    """The first difference between two descriptions, in words; None if they are equal.

    Args:
        names (tuple[str, str]): where the two are, such as "in the cache".
    """
    pairs: list[tuple[str, Any, Any]] = []
    if isinstance(here, Mapping) and isinstance(there, Mapping):
        for name in {**here, **there}:
            place = f"{field}.{name}" if field else name
            pairs.append((place, here.get(name), there.get(name)))
    elif isinstance(here, list) and isinstance(there, list):
        both = zip(here, there, strict=False)
        pairs += [(f"{field}[{place}]", *pair) for place, pair in enumerate(both)]
        if len(here) != len(there):
            pairs.append((f"number of {field}", len(here), len(there)))
    elif here != there:
        texts = _cut_to_difference(here, there)
        return f"{field}: {texts[0]} {names[0]}, {texts[1]} {names[1]}"
    found = (difference(one, other, names, place) for place, one, other in pairs)
    return next(filter(None, found), None)


def _cut_to_difference(*values: object) -> list[str]:
    """Both values as text, of long ones the part where they differ."""
    texts = [value if isinstance(value, str) else json.dumps(value) for value in values]
    start = 0
    if max(map(len, texts)) > _LONGEST:
        same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(*texts, strict=False))
        start = max(sum(1 for _ in same) - _LONGEST // 2, 0)
    end = start + _LONGEST
    return ["..." * (start > 0) + one[start:end] + "..." * (len(one) > end) for one in texts]
