"""What a caller wants moved, read and checked, for the native side."""

from __future__ import annotations

import operator
import time
from array import array
from collections.abc import Sequence
from typing import Any

from torch_kvswap import capi
from torch_kvswap.after import resolve_after
from torch_kvswap.gate import Gate
from torch_kvswap.groups import Groups
from torch_kvswap.ids import read_ids
from torch_kvswap.native import NativeHandler


class Request:
    """One submission, read and checked: `native`, with its ids copied. Raises TypeError and
    ValueError for what this handler cannot move, RuntimeError when its cache has moved."""

    __slots__ = ("_held", "native")

    def __init__(
        self,
        handler: NativeHandler,
        channel: int,
        gpu_block_ids: Any,
        page_ids: Any,
        first_block: Any,
        after: object,
        layer_groups: int | None = None,
        gate: Gate | None = None,
        background: bool = False,
    ) -> None:
        began = time.perf_counter()
        groups = handler.groups
        groups.check_unmoved()
        after_kind, after_handle = resolve_after(after, groups.device)
        parts, native_gate = 1, None
        if gate is not None or layer_groups is not None:
            parts, native_gate = _layer_parts(handler, layer_groups, gate)
        if groups.is_list:
            blocks, pages, counts = _read_lists(groups, gpu_block_ids, page_ids, first_block)
        else:
            blocks = read_ids("gpu_block_ids", gpu_block_ids)
            pages = read_ids("page_ids", page_ids)
            if type(first_block) is not int:
                first_block = _first_blocks(first_block, 1)[0]
            counts = array("q", (len(blocks), len(pages), first_block))
        self._held = blocks, pages, counts
        self.native = capi.Request(
            began,
            channel,
            parts,
            after_kind,
            groups.is_list,
            background,
            after_handle,
            native_gate,
            blocks.buffer_info()[0],
            pages.buffer_info()[0],
            counts.buffer_info()[0],
        )


def _layer_parts(
    handler: NativeHandler, parts: int | None, gate: Gate | None
) -> tuple[int, int | None]:
    """In how many groups of layers, and the native gate."""
    if gate is not None and gate.handler is not handler:
        raise ValueError("the gate was made by another handler than this load's")
    if parts is None:
        parts = 1 if gate is None else gate.parts
    parts, layers = operator.index(parts), handler.groups.num_layers
    if not 1 <= parts <= layers:
        raise ValueError(
            f"layer_groups={parts} of a cache with {layers} tensors; expected 1 to {layers}"
        )
    if gate is None:
        return parts, None
    if gate.parts != parts:
        raise ValueError(
            f"the gate has {gate.parts} parts, the load {parts} layer groups; make them equal"
        )
    return parts, gate.native


def _read_lists(
    groups: Groups, gpu_block_ids: Any, page_ids: Any, first_block: int | Sequence[int]
) -> tuple[array[int], array[int], array[int]]:
    """The ids of all groups, one after the other, and for each how many, and its first block."""
    blocks, num_blocks = _join("gpu_block_ids", gpu_block_ids, groups)
    pages, num_pages = _join("page_ids", page_ids, groups)
    first_blocks = _first_blocks(first_block, len(num_blocks))
    counts = array("q")
    for of_group in zip(num_blocks, num_pages, first_blocks, strict=True):
        counts.extend(of_group)
    return blocks, pages, counts


def _first_blocks(first_block: int | Sequence[int], groups: int) -> Sequence[int]:
    if not isinstance(first_block, Sequence):
        return [operator.index(first_block)] * groups
    if len(first_block) != groups:
        raise ValueError(f"first_block has {len(first_block)} entries for {groups} groups")
    return first_block


def _join(name: str, ids: Any, groups: Groups) -> tuple[array[int], list[int]]:
    """All ids one group after the other, and how many each group has."""
    if not isinstance(ids, Sequence) or len(ids) != len(groups.layouts):
        raise ValueError(
            f"{name} must be a list with the ids of each of the {len(groups.layouts)} groups; "
            "those without blocks in the job are empty"
        )
    lists = [read_ids(f"{name}[{group}]", of_group) for group, of_group in enumerate(ids)]
    joined = array("q")
    for one in lists:
        joined.extend(one)
    return joined, [len(one) for one in lists]
