#pragma once

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "copy/copy_method.h"
#include "copy/packing.h"
#include "kernels/slot.h"

namespace kvswap {

class ChecksumTable;

// What a launch that copies over the link has on its way at once. The link needs 128 to 192 KiB
// (PCIe 5). More would queue up there, and small compute kernels would wait behind them. With 512
// KiB a prefill loses 6.1 ms for each GB loaded, with 192 KiB 2.3, at the same rate (H100).
constexpr unsigned kBytesOverLink = 192 << 10;

// The words of an error about rejected blocks, such as "2 of 5 blocks do not fit into their slots
// (positions 1, 3)": `several` precedes the positions and `several_cause` follows them. one,
// one_cause: the same for a single block.
struct Rejection {
  std::string one, several, one_cause, several_cause;
  const char* brief;  // a sentence, for when there is no memory to say more
};

// Why slots are for kernels only, in the words of an error: what the caller has passed, what copy
// engines cannot do, and what to pass instead.
struct Demand {
  const char *option, *work, *instead;
};

// How a slot of a host page keeps its block: the one answer to what depends on that. csrc/offload
// and csrc/device know no more of it, and are called once for each part of a transfer.
//
// To add an encoding: derive from Encoding and PackTable in a file of this folder, with kernels in
// csrc/kernels/; name a function that makes it below and in csrc/bindings/encoding.cpp, and its
// name, options and for_native() in torch_kvswap/encoding/slot.py. Checksums are an encoding around
// another one (verified.cpp).
class Encoding : public Packing {
 public:
  virtual uint64_t slot_bytes() const = 0;
  // Null if copies without kernels will do.
  virtual const Demand* demand() const = 0;
  // Whether this method can copy between slots and blocks.
  virtual bool can_use(CopyMethod method) const = 0;
  // Whether slots can be rejected. If so, a copy writes the SlotState of each rejected one.
  virtual bool can_reject() const = 0;
  // Called if a slot has this state, which is not kGood.
  virtual const Rejection& rejection(SlotState state, bool is_store) const = 0;
  // Of a slot that is kCorrupted: what is known of the difference, as text.
  virtual std::string difference_in(int64_t /*slot*/) const { return ""; }
  // Whether a store that is packed writes more of its slots than the packed bytes. Then it is not
  // packed before earlier stores into them have ended.
  virtual bool packs_in_order() const { return false; }
  // Copies by the CPU, between host addresses.
  virtual void copy_on_host(const PagedCopy& copy) const = 0;
  // The table for a GPU, whose context is current. Null if its kernels cannot copy between these
  // slabs; throws if no other method can. Uploads the table on `stream` and waits for that.
  virtual std::shared_ptr<PackTable> make_table(const Slabs& gpu, const Slabs& host,
                                                int64_t num_blocks, int64_t num_slots, int device,
                                                void* stream) const = 0;
};

// Fills in which blocks and slots of a copy a launch works on: from block `first` to `end` - 1, or
// as many of them as it can have.
template <typename Arguments>
void set_blocks(Arguments& arguments, const PagedCopy& copy, size_t first, size_t end) {
  const size_t count = std::min(end - first, std::size(arguments.blocks));
  for (size_t i = 0; i < count; ++i) {
    arguments.blocks[i] = static_cast<int32_t>(copy.blocks[first + i]);
    arguments.slots[i] = static_cast<int32_t>(copy.slots[first + i]);
  }
  arguments.block_count = static_cast<uint32_t>(count);
}

// The same for the blocks with bytes [begin, end), counted block after block; and which bytes of
// them.
template <typename Arguments>
void set_bytes(Arguments& arguments, const PagedCopy& copy, size_t first, uint64_t begin,
               uint64_t end) {
  const uint64_t size = arguments.block_bytes, from = first * size;
  set_blocks(arguments, copy, first, (end + size - 1) / size);
  arguments.begin = std::max(begin, from) - from;
  arguments.end = std::min(end - from, arguments.block_count * size);
}

// sizes: bytes of a block in each slab.

// Blocks as they are, slab after slab.
std::shared_ptr<const Encoding> make_raw_encoding(const std::vector<uint64_t>& sizes);

// bf16 values as SlotFormat keeps them. Throws ValueError if such blocks cannot be encoded.
std::shared_ptr<const Encoding> make_lossless_encoding(const std::vector<uint64_t>& sizes);

// The same slots, with checksums of their blocks, that stores write and loads compare.
// Throws ValueError if a row of the table has no room for the checksums of such a block.
std::shared_ptr<const Encoding> make_verified_encoding(std::shared_ptr<const Encoding> slots,
                                                       const std::vector<uint64_t>& sizes,
                                                       const ChecksumTable& table);

}  // namespace kvswap
