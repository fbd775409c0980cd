#pragma once

#include <cstdint>

#include "encoding/slot_format.h"

// Encodes and decodes on the CPU. The kernels of codec.cu do the same, and each side reads what the
// other has written.
namespace kvswap {

// The tiles of a block, all of them, and how many escapes fit into its slot.
struct SlotTiles {
  const SlotTile* tiles;
  uint32_t count, max_escapes;
};

// Encodes a block into a slot. kOverflow: the slot holds no block.
SlotState encode_slot(const SlotTiles& tiles, int64_t block, uint8_t* slot);

// Decodes some tiles of a slot into a block. kRefused: the metadata, also those of other tiles, are
// not those of a block. Nothing was written then, unless the slot has changed meanwhile. Of the
// metadata, the kernels check only the header before they write; the rest they check tile by tile.
SlotState decode_slot(const SlotTiles& tiles, SlotFormat::TileRange range, const uint8_t* slot,
                      int64_t block);

}  // namespace kvswap
