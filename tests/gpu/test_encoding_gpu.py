"""The kernels write slots that the model of the format reads, and read slots that it has written,
for tiles of all sizes, and touch nothing else.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import pytest
import torch
from bf16_blocks import KINDS, Values, escapes_of, make_block, random_bits, real_page, with_escapes
from simulated_cache import needs_kernels
from simulated_driver import Driver, place, simulated
from slot_model import OVERFLOW, SlotModel

from torch_kvswap import HostPool, OffloadHandler, PagedLayout
from torch_kvswap.results import BlocksRejectedError

# Bytes of a block in each slab. Teams of one, two, four and eight warps have a tile.
SIZES = {
    "2 KiB": [2048] * 5,
    "4 KiB": [4096] * 3,
    "4 KiB and 64 B": [4096 + 64] * 3,
    "6 KiB": [6144] * 3,
    "16 KiB": [16 << 10] * 2,
    "18 KiB": [18 << 10] * 3,
    "32 KiB": [32 << 10] * 2,
    "32 KiB and 64 B": [(32 << 10) + 64] * 3,
    "2 MiB": [2 << 20],
    "mixed": [4096, 64, 40 << 10, 2048, 128],
    "small ones": [64, 8192, 64, 64, 9344],
}
METHODS = ["staged", "kernel"]
MakeLayout = Callable[[list[torch.Tensor]], PagedLayout]


class Cache:
    """Blocks of given values in slabs of a GPU, with 7 blocks more of other bits between them."""

    def __init__(self, blocks: Sequence[Sequence[Values]], on_gpu: MakeLayout) -> None:
        self.blocks = blocks
        self.sizes = [part.nbytes for part in blocks[0]]
        total = len(blocks) + 7
        self.ids, self.targets, self.pages = (
            torch.randperm(total)[: len(blocks)].tolist() for _ in range(3)
        )
        self.before = [
            torch.randint(-(1 << 15), 1 << 15, (total, size // 2), dtype=torch.int16)
            for size in self.sizes
        ]
        for block, parts in zip(self.ids, blocks, strict=True):
            for slab, part in zip(self.before, parts, strict=True):
                slab[block] = torch.from_numpy(part.view(np.int16))
        self.layout = on_gpu([slab.clone().view(torch.bfloat16) for slab in self.before])

    def pool(self) -> HostPool:
        pool = HostPool(self.layout, self.layout.num_blocks, encoding="lossless")
        pool.pages.fill_(0xA5)
        return pool

    def assert_loaded(self, moved: Sequence[int], undefined: Sequence[int] = ()) -> None:
        """The targets of these blocks have their values, and nothing else has changed, but for the
        targets of blocks that are undefined now.
        """
        for number, (slab, now) in enumerate(zip(self.before, self.layout.tensors, strict=True)):
            expected = slab.clone()
            for i in moved:
                expected[self.targets[i]] = slab[self.ids[i]]
            found = now.view(torch.int16).cpu()
            for i in undefined:
                expected[self.targets[i]] = found[self.targets[i]]
            assert torch.equal(found, expected), f"slab {number}"


def slot_of(pool: HostPool, page: int) -> np.ndarray:
    return pool.pages[page, 0].numpy()


def check(
    blocks: Sequence[Sequence[Values]], on_gpu: MakeLayout, copy_method: str, layer_groups: int = 1
) -> None:
    """The GPU encodes and the model decodes; the model encodes and the GPU decodes."""
    cache = Cache(blocks, on_gpu)
    pool, model = cache.pool(), SlotModel(cache.sizes)
    with OffloadHandler(cache.layout, pool, copy_method=copy_method) as handler:
        for _ in range(2):  # the first one leaves nothing behind that disturbs the second
            handler.synchronize([handler.store(gpu_block_ids=cache.ids, page_ids=cache.pages)])
        for page, block in zip(cache.pages, blocks, strict=True):
            assert model.state(slot_of(pool, page)) == escapes_of(block)
            for part, expected in zip(model.decode(slot_of(pool, page)), block, strict=True):
                np.testing.assert_array_equal(part, expected)
        for page in {*range(pool.num_pages)} - {*cache.pages}:
            assert (slot_of(pool, page) == 0xA5).all()

        for page, block in zip(cache.pages, blocks, strict=True):
            slot_of(pool, page)[:] = model.encode(block)
        load = handler.load(
            page_ids=cache.pages, gpu_block_ids=cache.targets, layer_groups=layer_groups
        )
        handler.synchronize([load])
        cache.assert_loaded(range(len(blocks)))
        assert load.result is not None
        assert load.result.copy_method == copy_method


def check_rejected(sizes: Sequence[int], on_gpu: MakeLayout, copy_method: str) -> None:
    """Blocks that do not fit are rejected, and those beside them are stored and loaded."""
    model = SlotModel(sizes)
    full = model.max_escapes
    blocks = [
        make_block("normal", sizes),
        with_escapes(sizes, full + 1),
        with_escapes(sizes, full),
        random_bits(sizes),
        make_block("outlier channels", sizes),
        *(with_escapes(sizes, 5) for _ in range(4)),
    ]
    cache = Cache(blocks, on_gpu)
    pool = cache.pool()
    with OffloadHandler(cache.layout, pool, copy_method=copy_method) as handler:
        store = handler.store(gpu_block_ids=cache.ids, page_ids=cache.pages)
        with pytest.raises(BlocksRejectedError) as rejected:
            handler.synchronize([store])
        assert rejected.value.rejected == (1, 3)
        states = [model.state(slot_of(pool, page)) for page in cache.pages]
        assert states[1:3] == [full + 1 | OVERFLOW, full]
        assert states[3] & OVERFLOW

        magic, entry, place, low, high = (slot_of(pool, page) for page in cache.pages[4:])
        magic[0] ^= 1
        entry[16 + 2 : 16 + 4] = 0xFF  # the escapes of the first tile
        place[model.places :][:2] = 0xFF
        low[16], high[16] = 0, 242  # the lowest exponent of the first tile
        load = handler.load(page_ids=cache.pages, gpu_block_ids=cache.targets)
        with pytest.raises(BlocksRejectedError) as rejected:
            handler.synchronize([load])
        assert rejected.value.rejected == (1, 3, 4, 5, 6, 7, 8)
        cache.assert_loaded([0, 2], undefined=[5, 6, 7, 8])


def on_cuda(tensors: list[torch.Tensor]) -> PagedLayout:
    return PagedLayout([tensor.cuda() for tensor in tensors])


def on_simulated(driver: Driver) -> MakeLayout:
    return lambda tensors: place(driver, PagedLayout(tensors))


def all_kinds(sizes: Sequence[int], count: int = len(KINDS) + 1) -> list[list[Values]]:
    kinds = list(KINDS)
    return [make_block(kinds[i % len(kinds)], sizes, i) for i in range(count)]


@pytest.mark.parametrize("copy_method", METHODS)
@pytest.mark.parametrize("sizes", SIZES)
@needs_kernels
@simulated
def test_slots_are_as_the_format_says(driver: Driver, sizes: str, copy_method: str) -> None:
    check(all_kinds(SIZES[sizes], 3), on_simulated(driver), copy_method)


@pytest.mark.parametrize("layer_groups", [2, 3])
@needs_kernels
@simulated
def test_layer_groups_are_decoded_by_themselves(driver: Driver, layer_groups: int) -> None:
    blocks = all_kinds(SIZES["mixed"], 3)
    check(blocks, on_simulated(driver), "staged", layer_groups=layer_groups)


@pytest.mark.parametrize("copy_method", METHODS)
@needs_kernels
@simulated
def test_what_does_not_fit_is_rejected(driver: Driver, copy_method: str) -> None:
    check_rejected(SIZES["6 KiB"], on_simulated(driver), copy_method)


@pytest.mark.parametrize("copy_method", METHODS)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.gpu
def test_slots_have_their_format_on_a_gpu(sizes: str, copy_method: str) -> None:
    check(all_kinds(SIZES[sizes]), on_cuda, copy_method)


@pytest.mark.parametrize("copy_method", METHODS)
@pytest.mark.gpu
def test_many_blocks_take_several_launches_on_gpu(copy_method: str) -> None:
    blocks = [make_block("normal", [4096, 2048], seed) for seed in range(1001)]
    check(blocks, on_cuda, copy_method)


@pytest.mark.parametrize("copy_method", METHODS)
@pytest.mark.gpu
def test_real_keys_and_values_fit_on_a_gpu(copy_method: str) -> None:
    check([real_page()] * 3, on_cuda, copy_method)


@pytest.mark.parametrize("copy_method", METHODS)
@pytest.mark.parametrize("layer_groups", [2, 3])
@pytest.mark.gpu
def test_layer_groups_are_decoded_alone_on_gpu(layer_groups: int, copy_method: str) -> None:
    check(all_kinds(SIZES["mixed"]), on_cuda, copy_method, layer_groups=layer_groups)


@pytest.mark.parametrize("copy_method", METHODS)
@pytest.mark.parametrize("sizes", ["2 KiB", "6 KiB", "32 KiB", "2 MiB", "mixed"])
@pytest.mark.gpu
def test_what_does_not_fit_is_rejected_on_gpu(sizes: str, copy_method: str) -> None:
    check_rejected(SIZES[sizes], on_cuda, copy_method)


@pytest.mark.gpu
def test_a_load_of_a_changing_page_ends() -> None:
    # The threads of a team read the metadata each for itself. They need not see the same.
    sizes = SIZES["2 MiB"]
    tiles = len(SlotModel(sizes).tiles)
    cache = Cache([with_escapes(sizes, 10 * tiles)], on_cuda)
    pool = cache.pool()
    with OffloadHandler(cache.layout, pool, copy_method="kernel") as handler:
        handler.store(gpu_block_ids=cache.ids, page_ids=cache.pages).synchronize(60)
        entries = slot_of(pool, cache.pages[0])[16:][: 8 * tiles].view("<u2").reshape(tiles, 4)
        escapes = entries[:, 1].copy()
        assert (escapes != 0).all()
        is_over = threading.Event()

        def change() -> None:
            while not is_over.is_set():
                entries[:, 1] = 0
                entries[:, 1] = escapes

        changer = threading.Thread(target=change)
        changer.start()
        try:
            for _ in range(200):
                handler.load(page_ids=cache.pages, gpu_block_ids=cache.targets).synchronize(60)
        finally:
            is_over.set()
            changer.join()
        cache.assert_loaded([], undefined=[0])
        handler.load(page_ids=cache.pages, gpu_block_ids=cache.targets).synchronize(60)
        cache.assert_loaded([0])


@pytest.mark.parametrize("encoding", ["raw", "lossless"])
@pytest.mark.gpu
def test_blocks_beyond_4_gib_are_moved(encoding: Literal["raw", "lossless"]) -> None:
    values, blocks, pages = 1 << 20, 2200, 2800
    cache = torch.zeros(blocks, values, dtype=torch.bfloat16, device="cuda")
    cache[-1] = torch.randn(values)
    layout = PagedLayout([cache])
    pool = HostPool(layout, pages, encoding=encoding)
    assert min((blocks - 2) * 2 * values, (pages - 1) * pool.slot_bytes) > 1 << 32
    stored = cache[-1].cpu().view(torch.int16)
    for copy_method in METHODS:
        with OffloadHandler(layout, pool, copy_method=copy_method) as handler:
            handler.store(gpu_block_ids=[blocks - 1], page_ids=[pages - 1]).synchronize(60)
            handler.load(page_ids=[pages - 1], gpu_block_ids=[blocks - 2]).synchronize(60)
        assert torch.equal(pool.read_block(pages - 1).view(torch.int16), stored)
        assert torch.equal(cache[-2].cpu().view(torch.int16), stored)
        assert not cache[:-2].any()
        cache[-2] = 0
        pool.pages[-1] = 0
