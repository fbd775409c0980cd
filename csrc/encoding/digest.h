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

// Numbers of a row that an error names while a later store into the slot may write them.
inline uint64_t read_number(const uint64_t& number) {
  return __atomic_load_n(&number, __ATOMIC_RELAXED);
}
inline void write_number(uint64_t& number, uint64_t value) {
  __atomic_store_n(&number, value, __ATOMIC_RELAXED);
}

}  // namespace kvswap
