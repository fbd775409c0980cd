#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "copy/copy_method.h"
#include "copy/fragment.h"
#include "copy/packing.h"

namespace kvswap {

// Why blocks are rejected, in the words of an error: "2 of 5 blocks", then `several`, then where
// they are in the job, then `several_cause`. one, one_cause: the same for a single block.
struct Rejection {
  std::string one, several, one_cause, several_cause;
  const char* brief;  // a sentence, for when there is no memory to say more
};

// How a slot of a host page keeps its block: the one answer to what depends on that. csrc/offload
// and csrc/device know no more of it, and are called once for each part of a transfer.
//
// To add an encoding: derive from Encoding and PackTable in a file of this folder, name a function
// that makes it below and in csrc/bindings/encoding.cpp. docs/encoding.md lists all files.
class Encoding : public Packing {
 public:
  // What the caller passes as `encoding`.
  virtual const char* name() const = 0;
  virtual uint64_t slot_bytes() const = 0;
  // Whether this method can copy between slots and blocks.
  virtual bool can_use(CopyMethod method) const = 0;
  // Throws ValueError if these slabs of host pages cannot be slots.
  virtual void check_slots(const Slabs& host) const = 0;
  // Null if no slot is ever rejected. Otherwise a copy writes the state of each rejected one.
  virtual const Rejection* rejection(bool is_store) const = 0;
  // Copies by the CPU, between host addresses.
  virtual void copy_on_host(const PagedCopy& copy) const = 0;
  // The table for a GPU, whose context is current. Null if its kernels cannot copy between these
  // slabs; throws if no other method can. Uploads the table on `stream` and waits for that.
  virtual std::shared_ptr<PackTable> make_table(const Slabs& gpu, const Slabs& host,
                                                int64_t num_blocks, int64_t num_slots, int device,
                                                void* stream) const = 0;
};

// sizes: bytes of a block in each slab.

// Blocks as they are, slab after slab.
std::shared_ptr<const Encoding> make_raw_encoding(const std::vector<uint64_t>& sizes);

// bf16 values as SlotFormat keeps them. Throws ValueError if such blocks cannot be encoded.
std::shared_ptr<const Encoding> make_lossless_encoding(const std::vector<uint64_t>& sizes,
                                                       int width_eighths);

}  // namespace kvswap
