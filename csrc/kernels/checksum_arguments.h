#pragma once

#include <cstdint>

#include "kernels/host_device.h"

// Checksums of blocks, with which loads find that a block is not the one that was stored: what the
// CPU and the kernel of checksum.cu share. tests/support/checksum_model.py has the function in
// plain Python. Read by nvcc and by the C++ compiler, so it has nothing but numbers.
//
// The function is NH, the hash of UMAC (RFC 4418), twice with shifted keys, mixed with the number
// of the tile. With random keys two different tiles collide with a probability of at most 2^-63.
// Our keys are fixed, so this holds for damage that does not know them.
namespace kvswap {

// A slab's part of a block is cut into tiles, each with a checksum. All are this large but its last
// one.
constexpr uint32_t kChecksumTileBytes = 8 << 10;
// Tiles of so many bytes of a slab.
KVSWAP_HOST_DEVICE constexpr uint32_t checksum_tiles(uint64_t bytes) {
  return static_cast<uint32_t>((bytes + kChecksumTileBytes - 1) / kChecksumTileBytes);
}
// A tile is read in units, the last one as if zeros followed. Word i of a unit's first half is
// multiplied by word i of its second half.
constexpr uint32_t kChecksumUnitBytes = 1 << 10;
constexpr uint32_t kChecksumUnitWords = kChecksumUnitBytes / sizeof(uint32_t);
// A key for each word of a tile. The second sum takes them from one unit further on.
constexpr uint32_t kChecksumKeys = kChecksumTileBytes / sizeof(uint32_t) + kChecksumUnitWords;

// A bijection of 64-bit numbers: each output bit depends on every input bit.
KVSWAP_HOST_DEVICE constexpr uint64_t mix_bits(uint64_t x) {
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
  x = (x ^ x >> 27) * 0x94d049bb133111eb;
  return x ^ x >> 31;
}

KVSWAP_HOST_DEVICE constexpr uint32_t checksum_key(uint32_t word) {
  return static_cast<uint32_t>(mix_bits((word + 1) * 0x9e3779b97f4a7c15) >> 32);
}

// The two sums over a tile.
struct ChecksumSums {
  uint64_t first = 0, second = 0;
};

// tile: its number in the block.
KVSWAP_HOST_DEVICE constexpr uint64_t checksum_of(const ChecksumSums& sums, uint32_t tile) {
  return mix_bits(mix_bits(sums.first + tile) + sums.second);
}

// Binds checksums to a slot and to a store, whose number, with that of its group, is not 0. Never
// 0, nor ~0.
KVSWAP_HOST_DEVICE constexpr uint64_t checksum_tag(uint64_t slot, uint64_t store) {
  const uint64_t tag = mix_bits(mix_bits(slot + 1) + store);
  return tag + 1 > 1 ? tag : 1;
}

// What is known of a slot. The checksums of its tiles follow, each xor the tag: so that one of
// another slot or store matches no more than one of other bytes.
struct SlotChecksums {
  uint64_t tag;  // ~tag: that store has left no block in the slot
  // The number of the latest store that was given to the device, with the number of its group,
  // which only the host reads and writes; 0 for none.
  uint64_t store;
  uint64_t tile, found;  // the last tile that did not match, and its checksum; or kNoTile
};
constexpr uint64_t kNoTile = ~uint64_t{0};  // the tag did not match, or the bytes cannot be decoded
static_assert(sizeof(SlotChecksums) == 32);

// A tile of block b is `bytes` bytes at base + b * stride.
struct ChecksumTile {
  uint64_t base, stride, bytes;
};

enum class ChecksumTask : uint32_t {
  kWrite,    // the checksums of blocks that are stored
  kCompare,  // with blocks that were loaded
};

// Warps of a CTA. Each warp checksums one tile at a time, but those of the first CTA see to the
// blocks.
constexpr uint32_t kChecksumWarps = 8;

// Blocks in one launch: the arguments of a kernel are limited to 4 KiB.
constexpr uint32_t kChecksumBlocks = 248;

// Blocks blocks[i], whose checksums are those of slots[i].
struct ChecksumArguments {
  uint64_t tiles;  // address of the ChecksumTile of the block's first tile
  uint64_t rows, row_stride;
  uint64_t states;  // a SlotState for each i: of the copy, and written if the block does not match
  uint32_t first_tile, tile_count, block_count;
  uint32_t word_bytes;  // divides all addresses and sizes
  ChecksumTask task;
  int32_t blocks[kChecksumBlocks];
  int32_t slots[kChecksumBlocks];
  uint64_t stores[kChecksumBlocks];  // their numbers
};
static_assert(sizeof(ChecksumArguments) <= 4096);

// The first field of the row of a slot.
KVSWAP_HOST_DEVICE inline SlotChecksums* checksums_at(uint64_t rows, uint64_t row_stride,
                                                      uint64_t slot) {
  return reinterpret_cast<SlotChecksums*>(rows + slot * row_stride);
}
// The checksums behind it.
KVSWAP_HOST_DEVICE inline uint64_t* checksums_behind(SlotChecksums* row) {
  return reinterpret_cast<uint64_t*>(row + 1);
}

}  // namespace kvswap
