#pragma once

#include <cstdint>

#include "copy/slabs.h"

// Blocks are spread over slabs on one side, in a cache. On the other they are packed: contiguous,
// in a staging buffer or a host page. The encodings of csrc/encoding implement both classes.
namespace kvswap {

// What packed blocks look like.
class Packing {
 public:
  virtual ~Packing() = default;

  // Bytes of a packed block, with these slabs only; one or more.
  virtual uint64_t packed_bytes(SlabRange slabs) const = 0;
  // Whether a piece of a staged copy may begin or end within a block.
  virtual bool is_divisible() const = 0;
  // Bytes [begin, end) of packed blocks, counted block after block, between a buffer and host
  // pages. Byte `begin` is at address `packed` of the buffer.
  virtual FragmentList page_fragments(const PagedCopy& copy, uint64_t begin, uint64_t end,
                                      uint64_t packed) const = 0;
};

// Packs and unpacks the blocks of a group by kernels, which find the slabs in an array in GPU
// memory. The context of the device is current in all calls.
class PackTable {
 public:
  // packing: outlives the table. address: of the array, which the table frees.
  PackTable(const Packing& packing, uint64_t address) : packing(packing), address_(address) {}
  virtual ~PackTable();
  PackTable(const PackTable&) = delete;
  PackTable& operator=(const PackTable&) = delete;
  // Leaves the memory allocated for ever: the device is lost, and may still read it.
  virtual void leak() noexcept { address_ = 0; }

  // Before any part of a copy, however it is done.
  virtual void begin_copy(const PagedCopy& /*copy*/) const {}
  // Packs (copy.to_host) or unpacks bytes [begin, end), counted block after block, between the
  // slabs and a buffer on the GPU. Byte `begin` is at address `packed`. Launches on `stream`.
  virtual void pack(const PagedCopy& copy, uint64_t begin, uint64_t end, uint64_t packed,
                    void* stream) const = 0;
  // Copies all blocks between the slabs and pinned host pages.
  virtual void copy_over_link(const PagedCopy& copy, void* stream) const = 0;
  // What has to come in `stream` behind a copy without pack() and copy_over_link().
  virtual void end_copy(const PagedCopy& /*copy*/, void* /*stream*/) const {}

  const Packing& packing;

 protected:
  uint64_t address() const { return address_; }

 private:
  uint64_t address_;
};

// Whether the numbers of all blocks and slots fit into the 32 bits that the kernels have for them.
bool has_kernel_ids(int64_t num_blocks, int64_t num_slots);

}  // namespace kvswap
