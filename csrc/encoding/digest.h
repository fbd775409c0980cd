#pragma once

#include <cstdint>
#include <vector>

#include "copy/slabs.h"
#include "kernels/digest.h"

// Digests on the CPU, as the kernel of digest.cu makes them.
namespace kvswap {

// Tiles are numbered in the order of the slabs. Returns the number of each slab's first one, and of
// all.
std::vector<uint32_t> first_digest_tiles(const std::vector<uint64_t>& sizes);

// The tiles of a block with their addresses in these slabs.
std::vector<DigestTile> digest_tiles_in(const Slabs& slabs);

// Bytes of the row of a slot.
uint64_t digest_row_bytes(const std::vector<uint64_t>& sizes);

// Does what the kernel does for blocks[i]. All addresses are of the host.
void digest_block(const DigestArguments& arguments, uint32_t i);

}  // namespace kvswap
