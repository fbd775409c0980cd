#pragma once

#include <cstdint>
#include <vector>

#include "copy/slabs.h"
#include "cuda/driver.h"
#include "cuda/kernels.h"
#include "encoding/slot_format.h"

// Encodes and decodes blocks on the GPU.
namespace kvswap {

// The tiles of a group's blocks as an array in GPU memory, for the kernels.
class TileTable {
 public:
  // Uploads the array on `stream` and waits for that. The context of the device is current. Throws
  // ValueError if blocks do not begin at multiples of 16 bytes.
  TileTable(const SlotFormat& format, const Slabs& gpu, cuda::Stream stream);
  ~TileTable();
  TileTable(const TileTable&) = delete;
  TileTable& operator=(const TileTable&) = delete;
  // Leaves the memory allocated for ever: the device is lost, and may still read it.
  void leak() noexcept { address_ = 0; }

  uint64_t address() const { return address_; }

 private:
  cuda::Address address_ = 0;
};

// GPU memory that encoding needs, for each stream on which it runs; zero before the first launch.
constexpr uint64_t kCounterBytes = kCodecBlocks * sizeof(SlotCounter);

// Blocks to encode, or to decode in some slabs, between the GPU's slabs and slots.
struct CodecCopy {
  const SlotFormat* format;
  const TileTable* table;
  SlabRange slabs;  // all of them if `to_host`
  const int64_t* blocks;
  size_t count;
  bool to_host;       // encodes
  uint64_t counters;  // kCounterBytes of GPU memory; 0 to decode
  // A SlotState for each block, in memory that the GPU can write. Written unless it is kGood.
  uint64_t states;

  // A packed slot has the metadata and the tiles of these slabs, and nothing else.
  uint64_t packed_bytes() const { return format->metadata_bytes() + format->run_bytes(slabs); }
};

// Blocks [first, last) of the copy, with packed slots one after another from `packed` on.
void code_packed(const CodecCopy& copy, size_t first, size_t last, uint64_t packed,
                 const cuda::Kernels& kernels, cuda::Stream stream);

// All blocks of the copy, with whole slots in pinned memory: that of block blocks[i] has number
// slots[i], counted from the address `host` on; they are `stride` bytes apart.
void code_on_host(const CodecCopy& copy, const int64_t* slots, uint64_t host, uint64_t stride,
                  const cuda::Kernels& kernels, cuda::Stream stream);

}  // namespace kvswap
