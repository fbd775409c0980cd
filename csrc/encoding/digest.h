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

// What a pool keeps beside its pages: see make_verified_encoding().
class DigestTable {
 public:
  DigestTable(uint64_t address, uint64_t row_bytes) : address_(address), row_bytes_(row_bytes) {}

  uint64_t rows() const { return address_ + row_bytes_; }
  uint64_t row_bytes() const { return row_bytes_; }
  SlotDigests& at(int64_t slot) const {
    return *digests_at(rows(), row_bytes_, static_cast<uint64_t>(slot));
  }
  uint64_t digest(int64_t slot, uint64_t tile) const {
    return read_number(digests_behind(&at(slot))[tile]);
  }
  // Whether a store has left a block in the slot; if so, the digests of its tiles as they are in
  // any slot, from the first one on. No job may use the slot.
  bool read(int64_t slot, std::vector<uint64_t>& digests) const;
  // As if a store had left a block with these digests in the slot, or, if there are none, no block.
  void write(int64_t slot, const std::vector<uint64_t>& digests) const;
  // The first of some numbers for stores, which no other store of any process gets.
  uint64_t take_stores(uint64_t count) const {
    auto* const used = reinterpret_cast<uint64_t*>(address_);
    return __atomic_fetch_add(used, count, __ATOMIC_RELAXED) + 1;
  }

 private:
  const uint64_t address_, row_bytes_;
};

}  // namespace kvswap
