#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "copy/slabs.h"
#include "kernels/slot.h"

namespace kvswap {

// Where everything is in the slots of a group: an encoded block of bf16 values has one slot of
// `slot_bytes`. The metadata comes first, then the tiles in the order of the slabs, so the slot's
// part for a range of slabs is its metadata and one contiguous run of tiles.
class SlotFormat {
 public:
  // sizes: of a block in each slab. Throws ValueError if such blocks cannot be encoded.
  explicit SlotFormat(const std::vector<uint64_t>& sizes);

  uint64_t slot_bytes() const { return slot_bytes_; }
  uint64_t metadata_bytes() const { return metadata_bytes_; }
  uint32_t max_escapes() const { return max_escapes_; }

  // Tiles are numbered in the order of the slabs.
  struct Tile {
    size_t slab;
    uint64_t offset_in_slab;
    uint32_t bytes;   // raw
    uint32_t offset;  // in the slot
  };
  const std::vector<Tile>& tiles() const { return tiles_; }
  uint32_t tile_count() const { return static_cast<uint32_t>(tiles_.size()); }
  uint32_t largest_tile() const { return largest_tile_; }  // raw bytes
  struct TileRange {
    uint32_t begin, end;
  };
  TileRange tiles_of(SlabRange slabs) const {
    return {first_tiles_[slabs.begin], first_tiles_[slabs.end]};
  }

  // The run of tiles of these slabs: where it begins in a slot, and its encoded bytes.
  uint64_t run_offset(SlabRange slabs) const { return end_offset(first_tiles_[slabs.begin]); }
  uint64_t run_bytes(SlabRange slabs) const {
    return end_offset(first_tiles_[slabs.end]) - run_offset(slabs);
  }
  // Of a slot with the metadata and the tiles of these slabs, and nothing else.
  uint64_t packed_bytes(SlabRange slabs) const { return metadata_bytes_ + run_bytes(slabs); }

 private:
  // Where the tiles before number `tile` end.
  uint64_t end_offset(uint32_t tile) const {
    return tile == tiles_.size() ? slot_bytes_ : tiles_[tile].offset;
  }

  std::vector<Tile> tiles_;
  std::vector<uint32_t> first_tiles_;  // of each slab, and the number of all tiles
  uint64_t slot_bytes_ = 0, metadata_bytes_ = 0;
  uint32_t max_escapes_ = 0, largest_tile_ = 0;
};

// The tiles of a block; the first one is at `begin` of a slot. Throws ValueError if a size is no
// multiple of kTileAlignment.
std::vector<SlotFormat::Tile> cut_into_tiles(const std::vector<uint64_t>& sizes, uint64_t begin);

// The tiles with their addresses in these slabs, for the codec.
std::vector<SlotTile> tiles_in(const Slabs& slabs, const std::vector<SlotFormat::Tile>& tiles);

}  // namespace kvswap
