#pragma once

#include <cstdint>
#include <vector>

#include "copy/slabs.h"
#include "kernels/checksum_arguments.h"

// Checksums on the CPU, as the kernel of checksum.cu makes them.
namespace kvswap {

// Tiles are numbered in the order of the slabs. Returns the number of each slab's first one, and of
// all.
std::vector<uint32_t> first_checksum_tiles(const std::vector<uint64_t>& sizes);

// The tiles of a block with their addresses in these slabs.
std::vector<ChecksumTile> checksum_tiles_in(const Slabs& slabs);

// Bytes of the row of a slot.
uint64_t checksum_row_bytes(const std::vector<uint64_t>& sizes);

// Does what the kernel does for blocks[i]. All addresses are of the host.
void checksum_block(const ChecksumArguments& arguments, uint32_t i);

// Numbers of a row that an error names while a later store into the slot may write them.
inline uint64_t read_number(const uint64_t& number) {
  return __atomic_load_n(&number, __ATOMIC_RELAXED);
}
inline void write_number(uint64_t& number, uint64_t value) {
  __atomic_store_n(&number, value, __ATOMIC_RELAXED);
}

// The number of a store has the group of its block in these bits, so that a block of another group
// has another tag. Counted stores do not reach them.
constexpr int kGroupShift = 48;
constexpr uint64_t kMaxGroups = 1 << 15;
constexpr uint64_t kGroupBits = (kMaxGroups - 1) << kGroupShift;
// A bit of the number of a store into another pool, whose row came with its block.
constexpr uint64_t kAdoptedStore = uint64_t{1} << 63;

constexpr uint64_t group_of(uint64_t store) { return (store & kGroupBits) >> kGroupShift; }

// A row of checksums for each slot of a pool, in host memory that the kernels can use, zeros at
// first.
class ChecksumTable {
 public:
  // counter: address of the number of the latest store, zero at first. rows: of the first row, a
  // multiple of 64, like their distance. row_bytes: room for the checksums of a slot. group: the
  // place among the handler's groups of the one whose blocks are stored and loaded.
  ChecksumTable(uint64_t counter, uint64_t rows, uint64_t row_stride, uint64_t row_bytes,
                uint64_t group);

  uint64_t row_bytes() const { return row_bytes_; }
  uint64_t group() const { return group_; }
  SlotChecksums& at(int64_t slot) const {
    return *checksums_at(rows_, row_stride_, static_cast<uint64_t>(slot));
  }
  uint64_t checksum(int64_t slot, uint64_t tile) const {
    return read_number(checksums_behind(&at(slot))[tile]);
  }
  // Whether a store has left a block of the group in the slot; if so, the checksums of its tiles as
  // they are in any slot, from the first one on. No job may use the slot.
  bool read(int64_t slot, std::vector<uint64_t>& checksums) const;
  // As if a store had left a block with these checksums in the slot, or, if there are none, no
  // block.
  void write(int64_t slot, const std::vector<uint64_t>& checksums) const;
  // Whether a store has left a block of any group in the slot. No job may use it.
  bool has_block(int64_t slot) const;
  // The slot was filled with all bytes of a slot of another pool, whose row came with its block:
  // binds the row to this slot. If it was damaged, its block does not match. No job may use it.
  void adopt(int64_t slot) const;
  // Before the first bytes of a copy are given to the device: a store gets a number for each block,
  // and a load takes that of the latest store. Blocks that have a number keep it.
  void number_stores(const PagedCopy& copy) const;
  // Fills in where the checksums of blocks [first, first + arguments.block_count) of a copy are,
  // and the numbers of their stores.
  void set_rows(ChecksumArguments& arguments, const PagedCopy& copy, size_t first) const;

 private:
  // Gives a store of the group its number, which no other store of any process has.
  uint64_t begin_store(SlotChecksums& row) const;
  // The number of the latest store, as if it had been one of the group; 0 for none.
  uint64_t stored_in(const SlotChecksums& row) const;

  const uint64_t counter_, rows_, row_stride_, row_bytes_, group_;
};

}  // namespace kvswap
