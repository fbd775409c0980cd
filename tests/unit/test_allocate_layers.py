"""Layers in one allocation, at one distance."""

from __future__ import annotations

import pytest
import torch
from error_text import error_text
from simulated_driver import DEVICE, Driver, simulated

import torch_kvswap as kvs

SHAPES = [(5, 3), (2, 5, 4, 8), (7, 512), (1,)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", SHAPES)
def test_layers_are_slices_of_one_allocation(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    layers = kvs.allocate_layers(shape, 4, dtype=dtype, device="cpu")
    assert len(layers) == 4
    assert len({layer.untyped_storage().data_ptr() for layer in layers}) == 1
    for layer in layers:
        assert (layer.shape, layer.dtype, layer.device.type) == (shape, dtype, "cpu")
        assert layer.is_contiguous()
        assert not layer.view(torch.uint8).any()
    addresses = [layer.data_ptr() for layer in layers]
    distance = addresses[1] - addresses[0]
    assert [address - addresses[0] for address in addresses] == [i * distance for i in range(4)]
    assert distance % 512 == 0
    nbytes = layers[0].nbytes
    assert nbytes <= distance < nbytes + 512
    assert layers[0].untyped_storage().nbytes() == 3 * distance + nbytes


def test_dtype_and_device_default_to_torchs() -> None:
    (layer,) = kvs.allocate_layers([2, 3], 1)
    assert (layer.dtype, layer.device) == (torch.zeros(1).dtype, torch.zeros(1).device)
    with torch.device("meta"):
        assert kvs.allocate_layers([2, 3], 1)[0].device.type == "meta"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((5, 3), 0), "ValueError: num_layers is 0; it must be 1 or more"),
        (((5, 3), 1.5), "TypeError: num_layers is a float; it must be an integer"),
        (((5, -3), 2), "ValueError: shape[1] is -3; it must be 1 or more"),
        (((5, 0), 2), "ValueError: shape[1] is 0; it must be 1 or more"),
        ((("5",), 2), "TypeError: shape[0] is a str; it must be an integer"),
        ((5, 2), "TypeError: shape is an int; pass the shape of one layer, such as (2, 1000, 16)"),
        (
            ((1 << 40, 1 << 20), 32),
            "ValueError: num_layers=32 with shape [1099511627776, 1048576] need "
            "147573952589676412928 bytes, more than can be addressed; ask for fewer blocks",
        ),
        (((), 2), "ValueError: shape is empty; a layer needs a dimension that counts blocks"),
    ],
)
def test_wrong_arguments_are_refused(arguments: tuple[object, ...], message: str) -> None:
    assert error_text(kvs.allocate_layers, *arguments).replace("\n", " ") == message


def test_a_device_that_is_not_there_is_refused() -> None:
    for device, said in (
        ("gpu", "it must be a device of PyTorch, such as 'cuda' or 'cpu'"),
        ("cuda:99", "but PyTorch cannot use it"),
        (3.5, "it must be a device of PyTorch"),
    ):
        with pytest.raises(ValueError, match=f"^device is {device!r}[;,] {said}") as refusal:
            kvs.allocate_layers((5, 3), 1, device=device)  # type: ignore[arg-type]
        assert len(str(refusal.value).splitlines()) == 1


def copies(driver: Driver, layers: list[torch.Tensor], block_dim: int) -> int:
    """Strided copies of a block, with the method that the handler chooses."""
    storage = layers[0].untyped_storage()
    driver.adopt(torch.empty(0, dtype=torch.uint8).set_(storage), DEVICE)
    layout = kvs.PagedLayout(layers, block_dim)
    layout.device = torch.device("cuda", 0)
    for layer in layers:
        layer.random_(0, 256)
    with kvs.HostPool(layout, num_pages=2) as host, kvs.OffloadHandler(layout, host) as handler:
        driver.log()
        job = handler.store(gpu_block_ids=[3], page_ids=[1])
        handler.synchronize(job)
        assert job.result is not None
        assert job.result.copy_method == "strided"
        blocks = [layer.select(block_dim, 3).flatten() for layer in layers]
        assert torch.equal(host.pages[1, 0], torch.cat(blocks))
    return driver.log().count("strided copy")


@pytest.mark.parametrize(
    ("shape", "block_dim"), [((5, 1000), 0), ((2, 8, 64), 1)], ids=["padded", "keys and values"]
)
@simulated
def test_a_block_is_one_strided_copy(
    driver: Driver, shape: tuple[int, ...], block_dim: int
) -> None:
    layers = kvs.allocate_layers(shape, 6, dtype=torch.uint8)
    assert copies(driver, layers, block_dim) == 1
