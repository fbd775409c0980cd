"""A cache tensor that has moved is found at the next submission."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from error_text import error_text, one_line
from torch import Tensor

from torch_kvswap.layout import PagedLayout
from torch_kvswap.offload.groups import AddressGuard


def make_layout(tensors: int = 3) -> PagedLayout:
    return PagedLayout([torch.zeros(4, 6) for _ in range(tensors)])


def replace_data(tensor: Tensor) -> None:
    tensor.data = torch.zeros(4, 6)


MOVES: dict[str, Callable[[Tensor], object]] = {
    "data": replace_data,
    "set_": lambda tensor: tensor.set_(torch.zeros(4, 6)),
    "set_ to a later part": lambda tensor: tensor.set_(torch.zeros(9, 6)[5:]),
    "resize_": lambda tensor: tensor.resize_(1 << 20),
    "storage grown": lambda tensor: tensor.untyped_storage().resize_(1 << 20),
    "shared": lambda tensor: tensor.share_memory_(),
}


@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("index", [0, 2])
def test_whatever_gives_a_tensor_other_memory_is_seen(move: str, index: int) -> None:
    layout = make_layout()
    watch = AddressGuard([make_layout(1), layout])
    watch.check()
    MOVES[move](layout.tensors[index])
    assert error_text(watch.check).startswith(
        f"RuntimeError: gpu[1].tensors[{index}] has moved from 0x"
    )


def shrink(tensor: Tensor, nbytes: int) -> None:
    tensor.untyped_storage().resize_(nbytes)


@pytest.mark.parametrize("left", [0, 8, 95])
def test_a_storage_that_lost_bytes_is_seen(left: int) -> None:
    layout = make_layout()
    watch = AddressGuard([layout])
    shrink(layout.tensors[1], left)
    assert one_line(watch.check) == (
        "RuntimeError: tensors[1] reaches to byte 96 of its storage, which was freed or resized "
        f"to {left} since the layout was made; make a new layout and pass it to rebind()"
    )


def test_a_smaller_storage_at_an_address_is_seen() -> None:
    """Allocators give addresses again, so that a storage that shrank twice may be where it was."""
    memory = torch.zeros(24)
    tensor = memory.view(4, 6)
    watch = AddressGuard([layout := PagedLayout([tensor])])
    watch.check()
    tensor.set_(torch.frombuffer(memory.numpy(), dtype=torch.float32, count=8))
    assert tensor.data_ptr() == layout._addresses[0]
    assert tensor.untyped_storage().nbytes() < 96
    assert "tensors[0] reaches to byte 96 of its storage" in error_text(watch.check)


def test_a_tensor_moved_before_watching_is_seen() -> None:
    layout = make_layout()
    replace_data(layout.tensors[1])
    assert "tensors[1] has moved" in error_text(AddressGuard([layout]).check)


def test_what_leaves_the_memory_alone_is_no_move() -> None:
    layout = make_layout()
    watch = AddressGuard([layout])
    for tensor in layout.tensors:
        tensor.fill_(1).unsqueeze_(0)
    watch.check()


def test_a_dropped_watch_releases_the_tensors() -> None:
    layout = make_layout()
    dropped = weakref.ref(layout.tensors[0].untyped_storage())
    tensor = weakref.ref(layout.tensors[0])
    watch = AddressGuard([layout])
    del layout
    gc.collect()
    assert tensor() is not None
    del watch
    gc.collect()
    assert (tensor(), dropped()) == (None, None)
