"""The kernels of the simulated driver do what the library's do, and a launch that they could not do
right is refused or told."""

from ctypes import Structure, c_int32, c_uint32, c_uint64
from typing import Any

import pytest
import torch
from simulated_driver import DEVICE, Driver, simulated
from simulated_driver.cuda import CudaError

BLOCKS = 496  # of a launch


class SlabEntry(Structure):
    _fields_ = [(name, c_uint64) for name in ("base", "stride", "offset", "bytes")]


class PackArguments(Structure):
    """Of csrc/kernels/pack_arguments.h."""

    _fields_ = [
        *((name, c_uint64) for name in ("slabs", "packed", "packed_stride")),
        *((name, c_uint64) for name in ("begin", "end", "block_bytes")),
        *((name, c_uint32) for name in ("slab_count", "block_count")),
        *((name, c_uint32) for name in ("chunk_bytes", "chunks_per_slab")),
        *((name, c_uint32) for name in ("to_packed", "word_bytes")),
        *((name, c_int32 * BLOCKS) for name in ("blocks", "slots")),
    ]


class SlotTile(Structure):
    _fields_ = [(name, c_uint64) for name in ("base", "stride")]
    _fields_ += [(name, c_uint32) for name in ("bytes", "offset")]


class CodecArguments(Structure):
    """Of csrc/kernels/slot.h."""

    _fields_ = [
        *((name, c_uint64) for name in ("tiles", "packed", "packed_stride")),
        *((name, c_uint64) for name in ("skipped", "counters", "states")),
        *((name, c_uint32) for name in ("all_tiles", "max_escapes")),
        *((name, c_uint32) for name in ("first_tile", "tile_count")),
        *((name, c_uint32) for name in ("block_count", "team_warps")),
        *((name, c_int32 * BLOCKS) for name in ("blocks", "slots")),
    ]


def entries(driver: Driver, of: Structure) -> int:
    """The address of a structure in memory that the driver knows."""
    memory = driver.memory(len(bytes(of)), DEVICE)
    memory.copy_(torch.frombuffer(bytearray(bytes(of)), dtype=torch.uint8))
    return memory.data_ptr()


def pack(
    driver: Driver, block: torch.Tensor, packed: torch.Tensor, chunk_bytes: int = 16
) -> PackArguments:
    """One block of one slab, in chunks, to packed memory."""
    slab = SlabEntry(base=block.data_ptr(), stride=block.nbytes, bytes=block.nbytes)
    return PackArguments(
        slabs=entries(driver, slab),
        packed=packed.data_ptr(),
        packed_stride=packed.nbytes,
        end=block.nbytes,
        block_bytes=block.nbytes,
        slab_count=1,
        block_count=1,
        chunk_bytes=chunk_bytes,
        chunks_per_slab=-(-block.nbytes // chunk_bytes),
        to_packed=1,
        word_bytes=16,
    )


TILE, SLOT, TILE_OFFSET = 64, 128, 64  # bytes; an encoded tile has 48
SHARED = 3 * 4096 + 256 * 4  # of one warp


class Coding:
    """A block of one tile with 32 values, its slot and what else a kernel needs, in memory that
    tests may register: the simulated kernels do not ask what memory it is."""

    def __init__(self, driver: Driver, tile: int = TILE, shift: int = 0) -> None:
        """shift: of the slot, in bytes."""
        self.values, self.counter, self.state = (
            torch.zeros(size, dtype=torch.uint8) for size in (tile, 8, 1)
        )
        self.values.view(torch.bfloat16).copy_(1 + torch.arange(tile // 2) % 100)
        self.slot = torch.zeros(TILE_OFFSET + tile + shift, dtype=torch.uint8)[shift:]
        entry = SlotTile(self.values.data_ptr(), tile, tile, TILE_OFFSET)
        self.arguments = CodecArguments(
            tiles=entries(driver, entry),
            packed=self.slot.data_ptr(),
            packed_stride=SLOT,
            counters=self.counter.data_ptr(),
            states=self.state.data_ptr(),
            all_tiles=1,
            max_escapes=8,
            tile_count=1,
            block_count=1,
            team_warps=1,
        )


def code_of(driver: Driver, *launch: Any, **options: Any) -> int:
    with pytest.raises(CudaError) as caught:
        driver.cuda.launch(*launch, **options)
    return caught.value.code


# Kernels that copy


@pytest.mark.parametrize("kernel", ["kvswap_pack_words", "kvswap_pack_bulk"])
@pytest.mark.parametrize("part", ["block", "packed", "chunk"])
@simulated
def test_a_kernel_that_copies_what_its_words_do_not_divide_is_told(
    driver: Driver, kernel: str, part: str
) -> None:
    block, packed = driver.memory(80, DEVICE), driver.memory(80, DEVICE)
    block, packed = block[8 * (part == "block") :][:64], packed[8 * (part == "packed") :][:64]
    chunk_bytes = 56 if part == "chunk" else 64
    arguments = pack(driver, block, packed, chunk_bytes)
    driver.cuda.launch(kernel, arguments, 42, shared=32 * chunk_bytes)
    assert driver.violations() > 0
    assert f"a kernel moves {chunk_bytes} bytes that are not aligned to 16" in driver.log()


@simulated
def test_a_bulk_kernel_needs_shared_memory_for_the_chunks_of_all_threads(driver: Driver) -> None:
    arguments = pack(driver, driver.memory(64, DEVICE), driver.memory(64, DEVICE))
    assert code_of(driver, "kvswap_pack_bulk", arguments, 42, shared=32 * 16 - 1) == 1
    driver.cuda.launch("kvswap_pack_bulk", arguments, 42, shared=32 * 16)


@simulated
def test_a_kernel_in_a_stream_of_another_gpu_is_refused(driver: Driver) -> None:
    arguments = pack(driver, driver.memory(64, DEVICE), driver.memory(64, DEVICE))
    with driver.on(1):
        stream = driver.cuda.create_stream()
    assert code_of(driver, "kvswap_pack_words", arguments, stream) == 400
    assert driver.violations() == 1
    with driver.on(1):
        driver.cuda.launch("kvswap_pack_words", arguments, stream)


@simulated
def test_memory_of_a_copying_kernel_that_has_not_run_may_not_go(driver: Driver) -> None:
    driver.set_mode("manual")
    pinned = torch.zeros(64, dtype=torch.uint8)
    driver.cuda.check("cuMemHostRegister", pinned.data_ptr(), 64, 0)
    driver.cuda.launch("kvswap_pack_words", pack(driver, driver.memory(64, DEVICE), pinned), 42)
    driver.cuda.check("cuMemHostUnregister", pinned.data_ptr())
    assert driver.violations() == 1


# Kernels that encode and decode


@pytest.mark.parametrize("kernel", ["kvswap_encode", "kvswap_decode"])
@simulated
def test_a_codec_kernel_needs_whole_teams_and_their_shared_memory(
    driver: Driver, kernel: str
) -> None:
    coding = Coding(driver)
    assert code_of(driver, kernel, coding.arguments, 42, shared=SHARED - 1) == 1
    for warps, team in ((1, 0), (3, 2), (16, 8)):
        coding.arguments.team_warps = team
        launch = kernel, coding.arguments, 42
        assert code_of(driver, *launch, threads=32 * warps, shared=1 << 20) == 1
    assert not coding.slot.any()


@simulated
def test_encoding_with_a_counter_that_is_not_0_is_told(driver: Driver) -> None:
    coding = Coding(driver)
    coding.counter[0] = 1
    driver.cuda.launch("kvswap_encode", coding.arguments, 42, shared=SHARED)
    assert driver.violations() == 1
    assert "a kernel encodes with a counter that is not 0" in driver.log()


@pytest.mark.parametrize("stream", [42, 43])
@simulated
def test_kernels_of_two_streams_may_not_use_the_same_counters(driver: Driver, stream: int) -> None:
    driver.set_mode("manual")
    coding = Coding(driver)
    driver.cuda.launch("kvswap_encode", coding.arguments, 42, shared=SHARED)
    driver.cuda.launch("kvswap_encode", coding.arguments, stream, shared=SHARED)
    assert driver.violations() == (stream == 43)


@pytest.mark.parametrize("tile", [4096, 4160])
@simulated
def test_a_tile_that_is_too_large_for_its_team_is_told(driver: Driver, tile: int) -> None:
    coding = Coding(driver, tile)
    driver.cuda.launch("kvswap_encode", coding.arguments, 42, shared=SHARED)
    assert driver.violations() == (tile == 4160)


@simulated
def test_a_slot_that_is_not_aligned_is_told(driver: Driver) -> None:
    coding = Coding(driver, shift=8)
    driver.cuda.launch("kvswap_encode", coding.arguments, 42, shared=SHARED)
    assert driver.violations() == 1
    assert "a kernel codes what is not aligned to 16" in driver.log()


@pytest.mark.parametrize("part", ["slot", "values", "counter", "nothing of it"])
@simulated
def test_memory_of_an_encoder_that_has_not_run_may_not_go(driver: Driver, part: str) -> None:
    driver.set_mode("manual")
    coding = Coding(driver)
    other = torch.zeros(8, dtype=torch.uint8)
    begin = getattr(coding, part, other).data_ptr()
    driver.cuda.check("cuMemHostRegister", begin, 8, 0)
    driver.cuda.launch("kvswap_encode", coding.arguments, 42, shared=SHARED)
    driver.cuda.check("cuMemHostUnregister", begin)
    assert driver.violations() == (part != "nothing of it")
