#include "encoding/slot_format.h"

#include <algorithm>

#include "check.h"

namespace kvswap {
namespace {

constexpr uint64_t kSlotAlignment = 16;
constexpr uint64_t kMaxBlockBytes = uint64_t{1} << 32;  // offsets in slots have 32 bits
// Bits of a slot for each value, in eighths of a bit.
constexpr uint64_t kWidthEighths = 97;

uint64_t checked_block_bytes(const std::vector<uint64_t>& sizes) {
  uint64_t bytes = 0;
  for (size_t slab = 0; slab < sizes.size(); ++slab) {
    if (sizes[slab] == 0 || sizes[slab] % kTileAlignment != 0) {
      fail<ValueError>("slab ", slab, " has ", sizes[slab],
                       " bytes of a block; lossless encoding needs a multiple of ", kTileAlignment,
                       " bytes in every slab");
    }
    if (sizes[slab] > kMaxBlockBytes - bytes) {
      fail<ValueError>("a block has more than ", kMaxBlockBytes,
                       " bytes, which lossless encoding cannot address");
    }
    bytes += sizes[slab];
  }
  return bytes;
}

}  // namespace

std::vector<SlotFormat::Tile> cut_into_tiles(const std::vector<uint64_t>& sizes, uint64_t begin) {
  checked_block_bytes(sizes);
  std::vector<SlotFormat::Tile> tiles;
  for (size_t slab = 0; slab < sizes.size(); ++slab) {
    for (uint64_t offset = 0; offset < sizes[slab]; offset += kTileBytes) {
      const auto bytes =
          static_cast<uint32_t>(std::min<uint64_t>(sizes[slab] - offset, kTileBytes));
      tiles.push_back({slab, offset, bytes, static_cast<uint32_t>(begin)});
      begin += encoded_bytes(bytes);
    }
  }
  return tiles;
}

SlotFormat::SlotFormat(const std::vector<uint64_t>& sizes) {
  const uint64_t raw = checked_block_bytes(sizes), encoded = raw / 4 * 3;
  slot_bytes_ = raw / sizeof(uint16_t) * kWidthEighths / 64;
  slot_bytes_ = slot_bytes_ / kSlotAlignment * kSlotAlignment;
  metadata_bytes_ = slot_bytes_ - encoded;
  tiles_ = cut_into_tiles(sizes, metadata_bytes_);
  const uint64_t fixed = places_offset(tile_count());
  if (metadata_bytes_ < fixed) {
    fail<ValueError>("a block of ", raw, " bytes in ", sizes.size(),
                     sizes.size() == 1 ? " slab" : " slabs", " needs ", encoded + fixed,
                     " bytes encoded, and a slot has ", slot_bytes_);
  }
  constexpr uint64_t kEscapeBytes = sizeof(uint16_t) + sizeof(uint8_t);
  max_escapes_ = static_cast<uint32_t>((metadata_bytes_ - fixed) / kEscapeBytes);
  for (uint32_t number = 0; number < tile_count(); ++number) {
    if (tiles_[number].offset_in_slab == 0) first_tiles_.push_back(number);
    largest_tile_ = std::max(largest_tile_, tiles_[number].bytes);
  }
  first_tiles_.push_back(tile_count());
}

std::vector<SlotTile> tiles_in(const Slabs& slabs, const std::vector<SlotFormat::Tile>& tiles) {
  std::vector<SlotTile> found;
  found.reserve(tiles.size());
  for (const SlotFormat::Tile& tile : tiles) {
    found.push_back({slabs.bases[tile.slab] + tile.offset_in_slab, slabs.strides[tile.slab],
                     tile.bytes, tile.offset});
  }
  return found;
}

}  // namespace kvswap
