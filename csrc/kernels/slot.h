#pragma once

#include <cstdint>

#include "kernels/host_device.h"

// What the CPU and the kernels know of an encoded slot: its structures, and the arguments of the
// kernels of codec.cu. tests/support/slot_model.py reads and writes slots in plain Python. Read by
// nvcc and by the C++ compiler, so it has nothing but numbers.
namespace kvswap {

// A slab's part of a block is cut into tiles. All are this large but its last one.
constexpr uint32_t kTileBytes = 32 << 10;
constexpr uint32_t kTileAlignment = 64;  // divides the bytes of a tile

// A value's exponent takes four bits: 0 stands for exponent 0 and for an escape, and 1 to 15 for 15
// exponents from the lowest one of the tile on.
constexpr uint32_t kWindow = 15;
constexpr uint32_t kMaxLowest = 255 - kWindow + 1;

constexpr uint32_t kSlotMagic = 0x4b450001;  // with the version of the format
constexpr uint32_t kSlotOverflow = 1u << 31;

struct SlotHeader {
  uint32_t magic;
  uint32_t state;  // escapes of the block; kSlotOverflow: more than fit, and the rest is undefined
  uint64_t reserved;
};

// Of one tile. Its escapes are `escapes` in a row, from `first_escape` of the slot on.
struct SlotEntry {
  uint8_t lowest, reserved;
  uint16_t escapes;
  uint32_t first_escape;
};
static_assert(sizeof(SlotHeader) == 16 && sizeof(SlotEntry) == 8);

// Metadata of a slot: the header, an entry for each tile of a block, then the escapes' places in
// their tiles (16 bits each) and their exponents (8 bits each).
constexpr uint64_t kEntriesOffset = sizeof(SlotHeader);
KVSWAP_HOST_DEVICE constexpr uint64_t places_offset(uint32_t tiles) {
  return kEntriesOffset + tiles * sizeof(SlotEntry);
}
KVSWAP_HOST_DEVICE constexpr uint64_t exponents_offset(uint32_t tiles, uint32_t max_escapes) {
  return places_offset(tiles) + uint64_t{max_escapes} * sizeof(uint16_t);
}

// An encoded tile: signs and mantissas of all values, then their codes of four bits.
KVSWAP_HOST_DEVICE constexpr uint32_t encoded_bytes(uint32_t raw_bytes) {
  return raw_bytes / 4 * 3;
}

// Codes are in words of 32 bits, for 8 values each: from the lowest code on for the values 0, 2, 4,
// 6, 1, 3, 5, 7. A kernel gets this order from two values in a register without moving them.
KVSWAP_HOST_DEVICE constexpr uint32_t value_of_code(uint32_t code) {
  return code < 4 ? 2 * code : 2 * code - 7;
}

// The lowest exponent of a tile is chosen by a quarter of its values, the same ones on the CPU and
// on the GPU: of each 16 bytes of the tile, 4 bytes. Returns which ones of vector number `vector`:
// 0 to 3. The choice changes from row to row of a head, so that all channels are sampled, and from
// thread to thread, so that threads read different banks of shared memory.
KVSWAP_HOST_DEVICE constexpr uint32_t sampled_word(uint32_t vector) {
  return ((vector >> 3) + (vector >> 5)) % 4;
}

// A tile of block b is `bytes` bytes at base + b * stride; in a slot it is at `offset`.
struct SlotTile {
  uint64_t base, stride;
  uint32_t bytes, offset;
};

// What became of a slot.
enum class SlotState : uint8_t {
  kGood = 0,
  kOverflow = 1,  // of an encoder: the block has more escapes than fit
  kRefused = 2,   // of a load: this is no slot, or one that has overflowed
  // Of checksums:
  kCorrupted = 3,  // the block that was loaded is not the one that was stored
};

// Blocks in one launch: the arguments of a kernel are limited to 4 KiB.
constexpr uint32_t kCodecBlocks = 496;

// Encodes blocks into slots, or decodes them: block blocks[i] and the slot at packed + i *
// packed_stride, or at packed + slots[i] * packed_stride.
struct CodecArguments {
  uint64_t tiles;  // address of the SlotTile of the block's first tile
  uint64_t packed, packed_stride;
  uint64_t skipped;   // bytes that slots lack between their metadata and tile `first_tile`
  uint64_t counters;  // of an encoder: a SlotCounter for each i, 0 before and after
  uint64_t states;    // a SlotState for each i, written unless it is kGood
  uint32_t all_tiles, max_escapes;  // of a slot
  uint32_t first_tile, tile_count;  // to work on; an encoder has all tiles
  uint32_t block_count;
  uint32_t team_warps;  // that work on one tile: 1, 2, 4 or 8
  uint32_t by_slot;
  int32_t blocks[kCodecBlocks];
  int32_t slots[kCodecBlocks];
};
static_assert(sizeof(CodecArguments) <= 4096);

// Shared memory: a team of warps has this much for each of its warps in each stage, and an encoder
// bins for all exponents.
constexpr uint32_t kCodecMaxWarps = 8;  // of a CTA
constexpr uint32_t kCodecStages = 3;
constexpr uint32_t kCodecWarpBytes = kTileBytes / kCodecMaxWarps;
constexpr uint32_t kCodecBins = 256;
constexpr uint32_t codec_shared_bytes(uint32_t cta_warps, uint32_t team_warps) {
  return cta_warps * kCodecStages * kCodecWarpBytes +
         cta_warps / team_warps * kCodecBins * static_cast<uint32_t>(sizeof(uint32_t));
}

// Of a slot that is being encoded: its escapes so far, and in the upper half its finished tiles.
using SlotCounter = unsigned long long;
constexpr SlotCounter kFinishedTile = SlotCounter{1} << 32;

}  // namespace kvswap
