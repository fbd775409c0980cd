#pragma once

#include <cstdint>

#include "kernels/host_device.h"

// Checksums of blocks, with which loads find that a block is not the one that was stored: what the
// CPU and the kernel of checksum.cu share. tests/support/checksum_model.py has the function in
// plain Python. Read by nvcc and by the C++ compiler, so it has nothing but numbers.
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

// A tile of block b is `bytes` bytes at base + b * stride. In a packed block it begins at byte
// `offset`.
struct ChecksumTile {
  uint64_t base, stride, bytes, offset;
};

enum class ChecksumTask : uint32_t {
  kWrite,    // the checksums of blocks that are stored
  kCompare,  // with blocks that were loaded
};

// Warps of a CTA. Each warp checksums one tile at a time, but those of the first CTA see to the
// blocks.
constexpr uint32_t kChecksumWarps = 8;
// The same of the kernel that also copies. Each warp has a tile in one of its stages while the next
// one arrives in another and the last one leaves.
constexpr uint32_t kChecksumCopyWarps = 4, kChecksumCopyStages = 3;

// Blocks in one launch: the arguments of a kernel are limited to 4 KiB.
constexpr uint32_t kChecksumBlocks = 248;

// Blocks blocks[i], whose checksums are those of slots[i].
struct ChecksumArguments {
  uint64_t tiles;  // address of the ChecksumTile of the block's first tile
  uint64_t rows, row_stride;
  uint64_t states;  // a SlotState for each i, written if the block does not match
  uint32_t first_tile, tile_count, block_count;
  uint32_t word_bytes;  // divides all addresses and sizes
  ChecksumTask task;
  // If the kernel also copies: bytes [begin, end), counted block after block, of packed blocks of
  // block_bytes. Packed block i is at packed + i * packed_stride, or at + slots[i] * packed_stride.
  uint64_t packed, packed_stride, begin, end, block_bytes;
  uint32_t by_slot, stage_bytes;
  int32_t blocks[kChecksumBlocks];
  int32_t slots[kChecksumBlocks];
  uint64_t stores[kChecksumBlocks];  // their numbers
};
static_assert(sizeof(ChecksumArguments) <= 4096);

// Bytes [from, to) of a tile are copied. If the tile ends with them, it is checksummed.
struct ChecksumCopy {
  uint64_t paged, packed;  // of byte 0
  uint32_t bytes, from, to;

  KVSWAP_HOST_DEVICE bool is_empty() const { return from >= to; }
  KVSWAP_HOST_DEVICE bool is_checksummed() const { return from < to && to == bytes; }
};

// tile: counted from first_tile on.
KVSWAP_HOST_DEVICE inline ChecksumCopy checksum_copy(const ChecksumArguments& a, uint32_t i,
                                                     uint32_t tile) {
  const auto* tiles = reinterpret_cast<const ChecksumTile*>(a.tiles) + a.first_tile;
  const ChecksumTile found = tiles[tile];
  const uint64_t offset = found.offset - tiles[0].offset;  // in the part of the block that is moved
  const uint64_t first = i * a.block_bytes + offset, last = first + found.bytes;
  const uint64_t from = a.begin > first ? a.begin - first : 0;
  const uint64_t to = a.end < last ? (a.end > first ? a.end - first : 0) : found.bytes;
  const uint64_t place = a.by_slot != 0 ? static_cast<uint64_t>(a.slots[i]) : i;
  return {found.base + static_cast<uint64_t>(a.blocks[i]) * found.stride,
          a.packed + place * a.packed_stride + offset, static_cast<uint32_t>(found.bytes),
          static_cast<uint32_t>(from < found.bytes ? from : found.bytes),
          static_cast<uint32_t>(to)};
}
// Whether blocks[i] ends with the bytes that are copied.
KVSWAP_HOST_DEVICE inline bool ends_block(const ChecksumArguments& a, uint32_t i) {
  return (i + 1) * a.block_bytes <= a.end;
}

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
