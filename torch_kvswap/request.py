"""What a caller wants moved, read and checked, for the native side."""

from __future__ import annotations

import operator
from array import array
from collections.abc import Sequence
from typing import Any

from torch_kvswap import capi
from torch_kvswap.after import resolve_after
from torch_kvswap.gate import Gate
from torch_kvswap.groups import Groups
from torch_kvswap.ids import read_ids
from torch_kvswap.native import NativeHandler
from torch_kvswap.result import Direction, direction_of


class Request:
    """One submission: how, and the ids of each group. Ids are copied in read_ids()."""

    def __init__(
        self,
        channel: int,
        first_block: int | Sequence[int],
        after: object,
        layer_groups: int | None = None,
        gate: Gate | None = None,
        background: bool = False,
    ) -> None:
        self.direction: Direction = direction_of(channel)
        self._channel = channel
        self._first_block = first_block
        self._after = after
        self.gate = gate
        self._layer_groups = layer_groups
        self._background = background

    def read_ids(self, gpu_block_ids: object, page_ids: object, handler: NativeHandler) -> None:
        """Raises TypeError and ValueError for what cannot be moved by this handler."""
        groups = handler.groups
        groups.check_unmoved()
        if self.gate is not None and self.gate.handler is not handler:
            raise ValueError("the gate was made by another handler than this load's")
        self._grouped = groups.is_list
        self._after_kind, self._after_handle = resolve_after(self._after, groups.device)
        self._parts = self._layer_parts(groups)
        self._blocks, blocks = _lists("gpu_block_ids", gpu_block_ids, groups)
        self._pages, pages = _lists("page_ids", page_ids, groups)
        first = self._first_block
        if not isinstance(first, Sequence):
            first = [operator.index(first)] * len(blocks)
        elif len(first) != len(blocks):
            raise ValueError(f"first_block has {len(first)} entries for {len(blocks)} groups")
        self._counts = array("q")
        for counts in zip(blocks, pages, first, strict=True):
            self._counts.extend(counts)

    def native(self, began: float) -> capi.Request:
        return capi.Request(
            began,
            self._channel,
            self._parts,
            self._after_kind,
            self._grouped,
            self._background,
            self._after_handle,
            None if self.gate is None else self.gate.native,
            self._blocks.buffer_info()[0],
            self._pages.buffer_info()[0],
            self._counts.buffer_info()[0],
        )

    def _layer_parts(self, groups: Groups) -> int:
        gate, parts = self.gate, self._layer_groups
        if parts is None:
            parts = 1 if gate is None else gate.parts
        parts = operator.index(parts)
        if not 1 <= parts <= groups.num_layers:
            raise ValueError(
                f"layer_groups={parts} of a cache with {groups.num_layers} tensors; expected 1 to "
                f"{groups.num_layers}"
            )
        if gate is not None and gate.parts != parts:
            raise ValueError(
                f"the gate has {gate.parts} parts, the load {parts} layer groups; make them equal"
            )
        return parts


def _lists(name: str, ids: Any, groups: Groups) -> tuple[array[int], list[int]]:
    """All ids one group after the other, and how many each group has."""
    if not groups.is_list:
        read = read_ids(name, ids)
        return read, [len(read)]
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
