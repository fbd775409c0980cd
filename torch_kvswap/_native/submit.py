"""What a caller wants moved, read and checked, for the native side."""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np

from torch_kvswap._native import abi
from torch_kvswap._native.arguments import INT64_MIN, read_int
from torch_kvswap._native.handler import NativeHandler
from torch_kvswap._native.ids import read_ids
from torch_kvswap.after import resolve_after
from torch_kvswap.gate import Gate
from torch_kvswap.groups import Groups


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
            first = read_int("first_block", first_block, INT64_MIN)
            counts = array("q", (len(blocks), len(pages), first))
        self._held = blocks, pages, counts
        self.native = abi.Request(
            began,
            channel,
            parts,
            after_kind,
            groups.is_list,
            bool(background),
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
    if gate is not None and not isinstance(gate, Gate):
        raise TypeError(f"gate is a {type(gate).__name__}; pass what OffloadHandler.gate() returns")
    if gate is not None and gate.handler is not handler:
        raise ValueError("the gate was made by another handler than this load's")
    if parts is None:
        parts = 1 if gate is None else gate.parts
    parts = read_int("layer_groups", parts, 1, handler.groups.num_layers)
    if gate is None:
        return parts, None
    if gate.parts != parts:
        raise ValueError(
            f"the gate has {gate.parts} parts, the load {parts} layer groups; make them equal"
        )
    return parts, gate.native


def _read_lists(
    groups: Groups, gpu_block_ids: Any, page_ids: Any, first_block: object
) -> tuple[array[int], array[int], array[int]]:
    """The ids of all groups, one after the other, and for each how many, and its first block."""
    blocks, num_blocks = _join("gpu_block_ids", gpu_block_ids, groups)
    pages, num_pages = _join("page_ids", page_ids, groups)
    first_blocks = _first_blocks(first_block, len(num_blocks))
    counts = array("q")
    for of_group in zip(num_blocks, num_pages, first_blocks, strict=True):
        counts.extend(of_group)
    return blocks, pages, counts


def _first_blocks(first_block: object, groups: int) -> list[int]:
    """For each group. The native side checks them against the blocks of a page."""
    if not isinstance(first_block, Sequence | np.ndarray):
        return [read_int("first_block", first_block, INT64_MIN)] * groups
    if len(first_block) != groups:
        raise ValueError(f"first_block has {len(first_block)} entries for {groups} groups")
    return [
        read_int(f"first_block[{group}]", of_group, INT64_MIN)
        for group, of_group in enumerate(first_block)
    ]


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
