#pragma once

#include <cstdint>

#include "kernels/host_device.h"

// Digests of blocks, with which loads find that a block is not the one that was stored:
// docs/encoding.md describes them. What the CPU and the kernel of digest.cu share. Read by nvcc and
// by the C++ compiler, so it has nothing but numbers.
namespace kvswap {

// A slab's part of a block is cut into tiles, each with a digest. All are this large but its last
// one.
constexpr uint32_t kDigestTileBytes = 8 << 10;
// Tiles of so many bytes of a slab.
KVSWAP_HOST_DEVICE constexpr uint32_t digest_tiles(uint64_t bytes) {
  return static_cast<uint32_t>((bytes + kDigestTileBytes - 1) / kDigestTileBytes);
}
// A tile is read in units, the last one as if zeros followed. Word i of a unit's first half is
// multiplied by word i of its second half.
constexpr uint32_t kDigestUnitBytes = 1 << 10;
constexpr uint32_t kDigestUnitWords = kDigestUnitBytes / sizeof(uint32_t);
// A key for each word of a tile. The second sum takes them from one unit further on.
constexpr uint32_t kDigestKeys = kDigestTileBytes / sizeof(uint32_t) + kDigestUnitWords;

// A bijection of 64-bit numbers: each output bit depends on every input bit.
KVSWAP_HOST_DEVICE constexpr uint64_t mix_bits(uint64_t x) {
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
  x = (x ^ x >> 27) * 0x94d049bb133111eb;
  return x ^ x >> 31;
}

KVSWAP_HOST_DEVICE constexpr uint32_t digest_key(uint32_t word) {
  return static_cast<uint32_t>(mix_bits((word + 1) * 0x9e3779b97f4a7c15) >> 32);
}

// The two sums over a tile.
struct DigestSums {
  uint64_t first = 0, second = 0;
};

// tile: its number in the block.
KVSWAP_HOST_DEVICE constexpr uint64_t digest_of(const DigestSums& sums, uint32_t tile) {
  return mix_bits(mix_bits(sums.first + tile) + sums.second);
}

// Binds digests to a slot and to a store, whose number, with that of its group, is not 0. Never 0,
// nor ~0.
KVSWAP_HOST_DEVICE constexpr uint64_t digest_tag(uint64_t slot, uint64_t store) {
  const uint64_t tag = mix_bits(mix_bits(slot + 1) + store);
  return tag + 1 > 1 ? tag : 1;
}

// What is known of a slot. The digests of its tiles follow, each xor the tag: so that one of
// another slot or store matches no more than one of other bytes.
struct SlotDigests {
  uint64_t tag;  // ~tag: that store has left no block in the slot
  // The number of the latest store that was given to the device, with the number of its group,
  // which only the host reads and writes; 0 for none.
  uint64_t store;
  uint64_t tile, found;  // the last tile that did not match, and its digest; or kNoTile
};
constexpr uint64_t kNoTile = ~uint64_t{0};  // the tag did not match, or the bytes not decode
static_assert(sizeof(SlotDigests) == 32);

// A tile of block b is `bytes` bytes at base + b * stride. In a packed block it begins at byte
// `offset`.
struct DigestTile {
  uint64_t base, stride, bytes, offset;
};

enum class DigestTask : uint32_t {
  kWrite,    // the digests of blocks that are stored
  kCompare,  // with blocks that were loaded
};

// Of a CTA. Each digests one tile at a time. A launch has one more CTA than those of the tiles.
constexpr uint32_t kDigestWarps = 8;
// The same of the kernel that also copies. Each warp has a tile in one of its stages while the next
// one arrives in another and the last one leaves.
constexpr uint32_t kDigestCopyWarps = 4, kDigestCopyStages = 3;

// Blocks in one launch: the arguments of a kernel are limited to 4 KiB.
constexpr uint32_t kDigestBlocks = 248;

// Blocks blocks[i], whose digests are those of slots[i].
struct DigestArguments {
  uint64_t tiles;  // address of the DigestTile of the block's first tile
  uint64_t rows, row_stride;
  uint64_t states;  // a SlotState for each i, written if the block does not match
  uint32_t first_tile, tile_count, block_count;
  uint32_t word_bytes;  // divides all addresses and sizes
  DigestTask task;
  // If the kernel also copies: bytes [begin, end), counted block after block, of packed blocks of
  // block_bytes. Packed block i is at packed + i * packed_stride, or at + slots[i] * packed_stride.
  uint64_t packed, packed_stride, begin, end, block_bytes;
  uint32_t by_slot, stage_bytes;
  int32_t blocks[kDigestBlocks];
  int32_t slots[kDigestBlocks];
  uint64_t stores[kDigestBlocks];  // their numbers
};
static_assert(sizeof(DigestArguments) <= 4096);

// Bytes [from, to) of a tile are copied. If the tile ends with them, it is digested.
struct DigestCopy {
  uint64_t paged, packed;  // of byte 0
  uint32_t bytes, from, to;

  KVSWAP_HOST_DEVICE bool is_empty() const { return from >= to; }
  KVSWAP_HOST_DEVICE bool is_digested() const { return from < to && to == bytes; }
};

// tile: counted from first_tile on.
KVSWAP_HOST_DEVICE inline DigestCopy digest_copy(const DigestArguments& a, uint32_t i,
                                                 uint32_t tile) {
  const auto* tiles = reinterpret_cast<const DigestTile*>(a.tiles) + a.first_tile;
  const DigestTile found = tiles[tile];
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
KVSWAP_HOST_DEVICE inline bool ends_block(const DigestArguments& a, uint32_t i) {
  return (i + 1) * a.block_bytes <= a.end;
}

// The first field of the row of a slot.
KVSWAP_HOST_DEVICE inline SlotDigests* digests_at(uint64_t rows, uint64_t row_stride,
                                                  uint64_t slot) {
  return reinterpret_cast<SlotDigests*>(rows + slot * row_stride);
}
// The digests behind it.
KVSWAP_HOST_DEVICE inline uint64_t* digests_behind(SlotDigests* row) {
  return reinterpret_cast<uint64_t*>(row + 1);
}

}  // namespace kvswap
