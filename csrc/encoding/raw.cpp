#include <algorithm>
#include <numeric>

#include "check.h"
#include "copy/host_copy.h"
#include "cuda/context.h"
#include "encoding/encoding.h"
#include "kernels/kernels.h"
#include "kernels/pack_arguments.h"

namespace kvswap {
namespace {

// ctas: at most. threads: of each CTA; each thread has a chunk of shared memory.
struct PackLaunch {
  unsigned ctas, threads;
  uint32_t chunk_bytes;
};

// Many CTAs for a short time disturb the compute beside them less than few for long: with 128 a
// decode GEMM loses 1.1 ms for each GB stored and 1.8 for each loaded, with 64 it loses 1.4 and 2.0
// (H200).
constexpr PackLaunch kOnDevice{128, 16, 2048};
constexpr unsigned kMaxCtasOverLink = 32, kMaxThreads = 32;
constexpr uint32_t kMaxChunk = 4096, kSharedBytes = 64 << 10;
// Of the kernel without bulk copies.
constexpr unsigned kWarpsPerCta = 8, kCtasOverLink = 8;

// As few CTAs with bulk copies as have kBytesOverLink on their way: many compute kernels do not fit
// on a multiprocessor beside one. longest: bytes of the longest fragment.
PackLaunch over_link(uint64_t longest) {
  constexpr uint64_t kChunkAlignment = 128;
  const uint64_t fragment = (longest + kChunkAlignment - 1) / kChunkAlignment * kChunkAlignment;
  const auto chunk = static_cast<uint32_t>(std::min<uint64_t>(fragment, kMaxChunk));
  const unsigned threads = std::min(kMaxThreads, kSharedBytes / chunk);
  const unsigned bytes = threads * chunk;
  return {std::min(kMaxCtasOverLink, (kBytesOverLink + bytes - 1) / bytes), threads, chunk};
}

// Whether the kernels can copy: has_kernel_ids(), and the slabs of a block are contiguous on the
// host.
bool is_packed(const Slabs& host, int64_t num_blocks, int64_t num_slots) {
  if (!has_kernel_ids(num_blocks, num_slots)) return false;
  for (size_t s = 1; s < host.count(); ++s) {
    if (host.bases[s] != host.bases[s - 1] + host.sizes[s - 1]) return false;
    if (host.strides[s] != host.strides[0]) return false;
  }
  return true;
}

uint64_t upload_slabs(const Slabs& gpu, const Slabs& host, cuda::Stream stream) {
  std::vector<SlabEntry> entries;
  for (size_t s = 0; s < gpu.count(); ++s) {
    entries.push_back({gpu.bases[s], gpu.strides[s], host.bases[s] - host.bases[0], gpu.sizes[s]});
  }
  return cuda::upload(entries.data(), entries.size() * sizeof(SlabEntry), stream,
                      "the table of slabs");
}

// The slabs of a cache as an array of SlabEntry.
class SlabTable : public PackTable {
 public:
  SlabTable(const Packing& packing, const Slabs& gpu, const Slabs& host, int device,
            cuda::Stream stream)
      : PackTable(packing, upload_slabs(gpu, host, stream)),
        kernels_(cuda::kernels(device)),
        longest_(*std::max_element(gpu.sizes.begin(), gpu.sizes.end())),
        word_bytes_(std::min(gpu.alignment(), host.alignment())) {}

  void pack(const PagedCopy& copy, uint64_t begin, uint64_t end, uint64_t packed,
            void* stream) const override {
    PackArguments arguments = arguments_of(copy, kOnDevice);
    const uint64_t size = arguments.block_bytes;
    arguments.packed_stride = size;
    for (size_t first = begin / size; first * size < end; first += arguments.block_count) {
      set_bytes(arguments, copy, first, begin, end);
      std::iota(arguments.slots, arguments.slots + arguments.block_count, 0);  // in the buffer
      arguments.packed = packed + first * size - begin;
      launch(arguments, kOnDevice, stream);
    }
  }

  void copy_over_link(const PagedCopy& copy, void* stream) const override {
    const PackLaunch shape =
        has_bulk_copies() ? over_link(longest_) : PackLaunch{kCtasOverLink, 0, kMaxChunk};
    PackArguments arguments = arguments_of(copy, shape);
    arguments.packed = copy.host->bases[copy.slabs.begin];
    arguments.packed_stride = copy.host->strides[copy.slabs.begin];
    arguments.end = ~uint64_t{0};
    for (size_t first = 0; first < copy.count; first += arguments.block_count) {
      set_blocks(arguments, copy, first, copy.count);
      launch(arguments, shape, stream);
    }
  }

 private:
  bool has_bulk_copies() const { return kernels_.pack_bulk != nullptr && word_bytes_ == 16; }

  void launch(PackArguments& arguments, const PackLaunch& shape, cuda::Stream stream) const {
    const bool bulk = has_bulk_copies();
    const unsigned chunks =
        arguments.block_count * arguments.slab_count * arguments.chunks_per_slab;
    const unsigned at_once = bulk ? shape.threads : kWarpsPerCta;
    const unsigned ctas = std::min(shape.ctas, (chunks + at_once - 1) / at_once);
    const unsigned threads = bulk ? shape.threads : 32 * kWarpsPerCta;
    const unsigned shared = bulk ? shape.threads * shape.chunk_bytes : 0;
    cuda::launch(bulk ? kernels_.pack_bulk : kernels_.pack_words, ctas, threads, shared, stream,
                 arguments, " of ", arguments.to_packed ? "pack" : "unpack", ", ",
                 arguments.block_count, " blocks of ", arguments.slab_count, " slabs");
  }

  // What is the same in every launch.
  PackArguments arguments_of(const PagedCopy& copy, const PackLaunch& shape) const {
    PackArguments arguments{};
    arguments.slabs = address() + copy.slabs.begin * sizeof(SlabEntry);
    arguments.block_bytes = packing.packed_bytes(copy.slabs);
    arguments.slab_count = static_cast<uint32_t>(copy.slabs.end - copy.slabs.begin);
    arguments.chunk_bytes = shape.chunk_bytes;
    arguments.chunks_per_slab =
        static_cast<uint32_t>((longest_ + shape.chunk_bytes - 1) / shape.chunk_bytes);
    arguments.to_packed = copy.to_host;
    arguments.word_bytes = word_bytes_;
    return arguments;
  }

  const cuda::Kernels& kernels_;
  const uint64_t longest_;  // bytes of a block in the slab where it has most
  const uint32_t word_bytes_;
};

class RawEncoding : public Encoding {
 public:
  explicit RawEncoding(const std::vector<uint64_t>& sizes) : offsets_(sizes.size() + 1) {
    std::partial_sum(sizes.begin(), sizes.end(), offsets_.begin() + 1);
  }

  uint64_t slot_bytes() const override { return offsets_.back(); }
  uint64_t packed_bytes(SlabRange slabs) const override {
    return offsets_[slabs.end] - offsets_[slabs.begin];
  }
  bool is_divisible() const override { return true; }
  bool can_use(CopyMethod) const override { return true; }
  const Demand* demand() const override { return nullptr; }
  bool can_reject() const override { return false; }
  const Rejection& rejection(SlotState, bool) const override {
    fail("raw slots are never rejected");
  }

  FragmentList page_fragments(const PagedCopy& copy, uint64_t begin, uint64_t end,
                              uint64_t packed) const override {
    const uint64_t size = packed_bytes(copy.slabs);
    FragmentList fragments(end / size - begin / size + 1);
    for (uint64_t from = begin; from < end;) {
      const uint64_t i = from / size, to = std::min(end, (i + 1) * size);
      const uint64_t page = copy.host_address(i) + (from - i * size);
      fragments.add(copy.fragment(i, packed + from - begin, page, to - from), copy.can_merge(i));
      from = to;
    }
    return fragments;
  }

  void copy_on_host(const PagedCopy& copy) const override {
    FragmentList fragments;
    add_fragments(fragments, copy.block_copy(), copy.slabs);
    kvswap::copy_on_host(fragments);
  }

  std::shared_ptr<PackTable> make_table(const Slabs& gpu, const Slabs& host, int64_t num_blocks,
                                        int64_t num_slots, int device,
                                        void* stream) const override {
    if (!is_packed(host, num_blocks, num_slots)) return nullptr;
    return std::make_shared<SlabTable>(*this, gpu, host, device, stream);
  }

 private:
  std::vector<uint64_t> offsets_;  // of each slab in a block, and the end of the last one
};

}  // namespace

std::shared_ptr<const Encoding> make_raw_encoding(const std::vector<uint64_t>& sizes) {
  return std::make_shared<RawEncoding>(sizes);
}

}  // namespace kvswap
