#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "copy/pack_arguments.h"
#include "copy/slabs.h"
#include "cuda/driver.h"
#include "cuda/kernels.h"
#include "encoding/launch.h"

// Copies by kernels. Blocks are spread over slabs on one side, on the GPU, and packed on the other:
// contiguous, in a staging buffer or a host page.
namespace kvswap {

// The slabs of a cache as an array in GPU memory, for the kernels.
class SlabTable {
 public:
  // Uploads the array on `stream` and waits for that. The context of the device is current.
  SlabTable(const Slabs& gpu, const Slabs& host, cuda::Stream stream);
  ~SlabTable();
  SlabTable(const SlabTable&) = delete;
  SlabTable& operator=(const SlabTable&) = delete;
  // Leaves the memory allocated for ever: the device is lost, and may still read it.
  void leak() noexcept { address_ = 0; }

  // The address of a slab's SlabEntry.
  uint64_t entry(size_t slab) const { return address_ + slab * sizeof(SlabEntry); }
  // The largest power of two, up to 16, that divides all addresses and sizes on both sides.
  uint32_t word_bytes() const { return word_bytes_; }
  // Bytes of a block in the slab where it has most.
  uint64_t longest() const { return longest_; }

 private:
  cuda::Address address_ = 0;
  uint64_t longest_;
  uint32_t word_bytes_ = 16;
};

// Whether the numbers of all blocks and slots fit into the 32 bits that the kernels have for them.
bool has_kernel_ids(int64_t num_blocks, int64_t num_slots);

// Whether the kernels can copy: has_kernel_ids(), and the slabs of a block are contiguous on the
// host.
bool is_packed(const Slabs& host, int64_t num_blocks, int64_t num_slots);

// A copy of blocks, in some slabs of a group, between the GPU and host pages.
struct PackedCopy {
  const Slabs* gpu;
  const Slabs* host;
  const SlabTable* table;  // null for encoded blocks
  SlabRange slabs;
  const int64_t* blocks;
  const int64_t* slots;
  size_t count;
  bool to_host;
  // Bytes of the same transfer that are copied just before and after these.
  uint64_t before = 0, after = 0;
  // Of encoded blocks, which are packed as slots: the metadata, and the tiles of the slabs.
  std::optional<CodecCopy> codec = {};

  // Of a packed block.
  uint64_t block_bytes() const;
  uint64_t bytes() const { return count * block_bytes(); }
  uint64_t host_address(size_t i) const { return host->address(slabs.begin, slots[i]); }
  // Whether one driver copy may span block i and the block before it.
  bool can_merge(size_t i) const { return i > 0 && host->in_one_chunk(slots[i - 1], slots[i]); }
};

// Packs (to_host) or unpacks bytes [begin, end) of the copy, counted block after block, between the
// GPU's slabs and a buffer on the GPU. Byte `begin` is at address `packed`. Launches on `stream`.
// Of encoded blocks, the bytes are whole slots.
void pack(const PackedCopy& copy, uint64_t begin, uint64_t end, uint64_t packed,
          const cuda::Kernels& kernels, cuda::Stream stream);

// Copies all blocks between the GPU's slabs and pinned host pages by a kernel.
void copy_by_kernel(const PackedCopy& copy, const cuda::Kernels& kernels, cuda::Stream stream);

}  // namespace kvswap
