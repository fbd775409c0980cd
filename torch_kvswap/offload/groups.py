"""The groups of a handler: layouts with their host pools, as the native side needs them."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch

from torch_kvswap._native.arguments import count_of, kind_of, read_int
from torch_kvswap._native.loader import native, ops
from torch_kvswap.devices.kind import is_native
from torch_kvswap.host_pool.memory import ForeignMemory
from torch_kvswap.host_pool.pool import HostPool
from torch_kvswap.layout import PagedLayout, block_spaces


class AddressGuard:
    """Checks before each submission that the tensors of the layouts have not moved.

    `.data =`, `set_()`, `share_memory_()`, and `resize_()` of a tensor or its storage give a tensor
    other memory. Only `set_()` and `resize_()` increment its version, so every check reads every
    address and storage size (a storage that shrank and grew again may be back at its address). The
    native side reads them through references of its own, in a few nanoseconds per tensor;
    `Tensor.data_ptr` from Python takes 70 ns. The references end when the guard is dropped.

    Attributes:
        native (int): what native.cache_has_moved() takes.
    """

    def __init__(self, layouts: Sequence[PagedLayout]) -> None:
        self._layouts = layouts
        tensors = [tensor for layout in layouts for tensor in layout.tensors]
        addresses = [address for layout in layouts for address in layout._addresses]
        ends = [end for layout in layouts for end in layout._storage_ends]
        watch_cache = ops.torch_kvswap._watch_cache
        self.native: int = watch_cache(tensors, addresses, ends)
        # Not at exit, when other threads may still submit.
        weakref.finalize(self, native.release_cache, self.native).atexit = False

    def check(self) -> None:
        """Raises RuntimeError that names the tensor if one has moved."""
        if native.cache_has_moved(self.native):
            for layout, (name, _) in zip(self._layouts, names_of(self._layouts), strict=True):
                layout._check_unmoved(f"{name}.tensors" if len(self._layouts) > 1 else "tensors")


class Groups:
    """Layouts and their pools, checked against each other.

    Holds the memory of both.

    Args:
        gpu: the layout, or a list of layouts.
        host: the pool, or a list with one pool per layout.

    Attributes:
        is_list (bool): whether the caller passed lists, and so passes lists of ids.
        layouts (tuple[PagedLayout, ...]): the layouts.
        pools (tuple[HostPool, ...]): the pools, one per layout.
        device (torch.device): the device of all layouts.
        foreign (list): the memory of pools that somebody else owns.
        num_layers (int): tensors of all layouts, numbered in order.
        layouts_for_native (list[native.GroupLayout]): the groups for the native side. They point
            into memory that this object holds.
        guard (AddressGuard): of the tensors of all layouts.

    Raises what OffloadHandler does for these arguments.
    """

    def __init__(
        self,
        gpu: PagedLayout | Sequence[PagedLayout],
        host: HostPool | Sequence[HostPool],
    ) -> None:
        self.is_list = isinstance(gpu, Sequence)
        self.layouts, self.pools = in_tuples(gpu, host)
        _check_match(self.layouts, self.pools)
        for pool in self.pools:
            pool._memory.check_open()
        self.foreign = [
            pool._memory for pool in self.pools if isinstance(pool._memory.mapping, ForeignMemory)
        ]
        self.device: torch.device = self.layouts[0].device
        if not is_native(self.device.type):
            raise ValueError(
                f"the cache is on {self.device}, which only PyTorch drives; use "
                "torch_kvswap.reference.ReferenceHandler there (docs/devices.md)"
            )
        self.num_layers = sum(len(layout.tensors) for layout in self.layouts)
        self.guard = AddressGuard(self.layouts)
        self.guard.check()  # before the addresses are read
        self.layouts_for_native = self._describe()

    def _describe(self) -> list[native.GroupLayout]:
        pools = {id(pool._ready_range): number for number, pool in enumerate(self.pools)}
        first_layer, described = 0, []
        of_groups = zip(self.layouts, self.pools, block_spaces(self.layouts), strict=True)
        for group, (layout, pool, space) in enumerate(of_groups):
            described.append(
                native.GroupLayout(
                    gpu_bases=layout.bases,
                    gpu_strides=layout.strides,
                    gpu_storages=layout._storages,
                    sizes=layout.sizes,
                    host_bases=pool._slabs.bases,
                    host_strides=pool._slabs.strides,
                    layers=first_layer + layout._tensor_of_slab,
                    num_blocks=layout.num_blocks,
                    num_pages=pool.num_pages,
                    blocks_per_page=pool.blocks_per_page,
                    block_space=space,
                    slot_space=pools[id(pool._ready_range)],
                    encoding=pool._encoding_for_native(layout.sizes, group),
                    ready_range=pool._ready_range,
                )
            )
            first_layer += len(layout.tensors)
        return described

    def read_layer_groups(self, layer_groups: object) -> int:
        """Checks the number of layer groups of a load.

        Raises TypeError or ValueError, with the advice for a tensor of several layers.
        """
        try:
            return read_int("layer_groups", layer_groups, 1, self.num_layers)
        except ValueError as error:
            raise ValueError(f"{error}{self._how_to_split()}") from None

    def _how_to_split(self) -> str:
        """What makes layers of the first tensor that seems to have several, if there is one."""
        for layout in self.layouts:
            before = layout.block_dim
            for tensor in layout.tensors:
                shape = list(tensor.shape)
                if (most := max(shape[:before], default=0)) > 2:  # 2 may be keys and values
                    return (
                        f", because a tensor counts as one layer: if kv of shape {shape} has "
                        f"{most} layers, make the layout of kv.unbind({shape.index(most)}) with "
                        f"block_dim={before - 1}"
                    )
        return ""

    def moved_to(self, gpu: PagedLayout | Sequence[PagedLayout]) -> Groups:
        """Combines the same pools with other layouts.

        Raises:
            TypeError: these are no layouts, or a list instead of one.
            ValueError: the layouts do not match the pools, or the device or number of tensors
                changed.
        """
        layouts = gpu if self.is_list else [gpu]
        if not isinstance(layouts, Sequence) or not all(
            isinstance(layout, PagedLayout) for layout in layouts
        ):
            wanted = f"a list of {count_of(len(self.pools), 'PagedLayout')}"
            raise TypeError(
                f"gpu is {_describe(gpu)}; pass {wanted if self.is_list else 'a PagedLayout'}, as "
                "before"
            )
        groups = Groups(gpu, self.pools if self.is_list else self.pools[0])
        if groups.device != self.device:
            raise ValueError(
                f"the cache was on {self.device}, the new one is on {groups.device}; make a new "
                "handler and pool for it"
            )
        if groups.num_layers != self.num_layers:
            tensors = count_of(self.num_layers, "tensor")
            raise ValueError(f"the cache had {tensors}, the new one has {groups.num_layers}")
        return groups


def in_tuples(
    gpu: PagedLayout | Sequence[PagedLayout], host: HostPool | Sequence[HostPool]
) -> tuple[tuple[PagedLayout, ...], tuple[HostPool, ...]]:
    """The layouts and the pools. Raises TypeError for tensors, or if only one side is a list."""
    _check_no_tensors(gpu)
    if isinstance(gpu, Sequence) and isinstance(host, Sequence):
        return tuple(gpu), tuple(host)
    if isinstance(gpu, Sequence) or isinstance(host, Sequence):
        raise TypeError(
            f"gpu is {_describe(gpu)}, host is {_describe(host)}; pass one of each, or a list of "
            "each"
        )
    return (gpu,), (host,)


def names_of(layouts: Sequence[object]) -> list[tuple[str, str]]:
    """What errors call the layout and the pool of each group."""
    if len(layouts) == 1:
        return [("the cache", "the host pool")]
    return [(f"gpu[{group}]", f"host[{group}]") for group in range(len(layouts))]


def _describe(value: object) -> str:
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        return kind_of(value)
    kinds = {type(item).__name__ for item in value}
    return f"{kind_of(value)} of {count_of(len(value), kinds.pop() if len(kinds) == 1 else 'item')}"


def _check_no_tensors(gpu: object) -> None:
    if isinstance(gpu, torch.Tensor):
        raise TypeError(f"gpu is {_describe(gpu)}; pass PagedLayout([tensor])")
    if isinstance(gpu, Sequence) and any(isinstance(item, torch.Tensor) for item in gpu):
        raise TypeError(f"gpu is {_describe(gpu)}; pass PagedLayout(tensors)")


def _check_match(layouts: Sequence[PagedLayout], pools: Sequence[HostPool]) -> None:
    for kind, items in ((PagedLayout, layouts), (HostPool, pools)):
        for item in items:
            if not isinstance(item, kind):
                raise TypeError(
                    "a handler takes a PagedLayout and a HostPool, in this order, or a list of "
                    f"each; got {kind_of(item)} instead of a {kind.__name__}"
                )
    if not layouts or len(layouts) != len(pools):
        raise ValueError(
            f"{count_of(len(layouts), 'layout')} and {count_of(len(pools), 'host pool')}: each "
            "layout needs one pool"
        )
    for layout, pool, names in zip(layouts, pools, names_of(layouts), strict=True):
        cache, host = names
        advice = "make the pool from this layout"
        if len(layouts) > 1:
            advice = f"make {host} from {cache}"
        if layout.device != layouts[0].device:
            raise ValueError(
                f"gpu[0] is on {layouts[0].device}, {cache} on {layout.device}; make a handler for "
                "each device"
            )
        if layout.device.type != pool.device.type:
            raise ValueError(
                f"{cache} is on {layout.device}, {host} was made for {pool.device}; {advice}"
            )
        # Says what is wrong if the pool encodes blocks and these cannot be encoded.
        pool._encoding.slot_bytes(layout, f"{advice} with encoding='raw'", name=cache)
        pool._check_blocks(layout, advice, names)
