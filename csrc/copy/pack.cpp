#include "copy/pack.h"

#include <algorithm>
#include <limits>

#include "check.h"
#include "cuda/context.h"

namespace kvswap {
namespace {

// ctas: at most. threads: of each CTA; each thread has a chunk of shared memory.
struct PackLaunch {
  unsigned ctas, threads;
  uint32_t chunk_bytes;
};

// Many CTAs for a short time disturb the compute beside them less than few for long: with 128 a
// decode GEMM loses 1.1 ms for each GB stored and 1.8 for each loaded, with 64 it loses 1.4 and 2.0
// (H200). Over the link a few have enough in flight.
constexpr PackLaunch kOnDevice{128, 16, 2048}, kOverLink{8, 16, 4096};
constexpr unsigned kWarpsPerCta = 8;  // of the kernel without bulk copies

uint32_t common_alignment(const Slabs& gpu, const Slabs& host) {
  uint64_t bits = 16;
  for (const Slabs* side : {&gpu, &host}) {
    for (size_t s = 0; s < side->count(); ++s) {
      bits |= side->bases[s] | side->strides[s] | side->sizes[s];
    }
  }
  return static_cast<uint32_t>(bits & -bits);
}

void launch(PackArguments& arguments, const PackLaunch& shape, const cuda::Kernels& kernels,
            cuda::Stream stream) {
  const bool bulk = kernels.pack_bulk != nullptr && arguments.word_bytes == 16;
  const unsigned chunks = arguments.block_count * arguments.slab_count * arguments.chunks_per_slab;
  const unsigned at_once = bulk ? shape.threads : kWarpsPerCta;
  const unsigned ctas = std::min(shape.ctas, (chunks + at_once - 1) / at_once);
  const unsigned threads = bulk ? shape.threads : 32 * kWarpsPerCta;
  const unsigned shared = bulk ? shape.threads * shape.chunk_bytes : 0;
  void* pointers[] = {&arguments};
  const cuda::Result result =
      cuda::driver().launch(bulk ? kernels.pack_bulk : kernels.pack_words, ctas, 1, 1, threads, 1,
                            1, shared, stream, pointers, nullptr);
  KVSWAP_DRIVER_CHECK(result, "cuLaunchKernel", " of ", arguments.to_packed ? "pack" : "unpack",
                      ", ", arguments.block_count, " blocks of ", arguments.slab_count, " slabs");
}

// What is the same in every launch.
PackArguments arguments_of(const PackedCopy& copy, const PackLaunch& shape) {
  PackArguments arguments{};
  arguments.slabs = copy.table->entry(copy.slabs.begin);
  arguments.block_bytes = copy.block_bytes();
  arguments.slab_count = static_cast<uint32_t>(copy.slabs.end - copy.slabs.begin);
  arguments.chunk_bytes = shape.chunk_bytes;
  arguments.chunks_per_slab =
      static_cast<uint32_t>((copy.table->longest() + shape.chunk_bytes - 1) / shape.chunk_bytes);
  arguments.to_packed = copy.to_host;
  arguments.word_bytes = copy.table->word_bytes();
  return arguments;
}

}  // namespace

SlabTable::SlabTable(const Slabs& gpu, const Slabs& host, cuda::Stream stream)
    : longest_(*std::max_element(gpu.sizes.begin(), gpu.sizes.end())),
      word_bytes_(common_alignment(gpu, host)) {
  std::vector<SlabEntry> entries;
  for (size_t s = 0; s < gpu.count(); ++s) {
    entries.push_back({gpu.bases[s], gpu.strides[s], host.bases[s] - host.bases[0], gpu.sizes[s]});
  }
  address_ = cuda::upload(entries.data(), entries.size() * sizeof(SlabEntry), stream,
                          "the table of slabs");
}

SlabTable::~SlabTable() {
  if (address_ != 0) cuda::driver().free(address_);
}

bool has_kernel_ids(int64_t num_blocks, int64_t num_slots) {
  constexpr int64_t kMaxId = std::numeric_limits<int32_t>::max();
  return num_blocks <= kMaxId && num_slots <= kMaxId;
}

bool is_packed(const Slabs& host, int64_t num_blocks, int64_t num_slots) {
  if (!has_kernel_ids(num_blocks, num_slots)) return false;
  for (size_t s = 1; s < host.count(); ++s) {
    if (host.bases[s] != host.bases[s - 1] + host.sizes[s - 1]) return false;
    if (host.strides[s] != host.strides[0]) return false;
  }
  return true;
}

uint64_t PackedCopy::block_bytes() const {
  if (codec) return codec->packed_bytes();
  const size_t last = slabs.end - 1;
  return host->bases[last] + host->sizes[last] - host->bases[slabs.begin];
}

void pack(const PackedCopy& copy, uint64_t begin, uint64_t end, uint64_t packed,
          const cuda::Kernels& kernels, cuda::Stream stream) {
  if (copy.codec) {
    const uint64_t size = copy.block_bytes();
    return code_packed(*copy.codec, begin / size, end / size, packed, kernels, stream);
  }
  PackArguments arguments = arguments_of(copy, kOnDevice);
  const uint64_t size = arguments.block_bytes;
  arguments.packed_stride = size;
  for (size_t first = begin / size; first * size < end; first += kPackBlocks) {
    const size_t last = std::min<size_t>((end + size - 1) / size, first + kPackBlocks);
    arguments.block_count = static_cast<uint32_t>(last - first);
    for (size_t i = first; i < last; ++i) {
      arguments.blocks[i - first] = static_cast<int32_t>(copy.blocks[i]);
      arguments.slots[i - first] = static_cast<int32_t>(i - first);
    }
    arguments.begin = std::max(begin, first * size) - first * size;
    arguments.end = std::min(end, last * size) - first * size;
    arguments.packed = packed + first * size - begin;
    launch(arguments, kOnDevice, kernels, stream);
  }
}

void copy_by_kernel(const PackedCopy& copy, const cuda::Kernels& kernels, cuda::Stream stream) {
  if (copy.codec) {
    return code_on_host(*copy.codec, copy.slots, copy.host->bases[0], copy.host->strides[0],
                        kernels, stream);
  }
  PackArguments arguments = arguments_of(copy, kOverLink);
  arguments.packed = copy.host->bases[copy.slabs.begin];
  arguments.packed_stride = copy.host->strides[copy.slabs.begin];
  arguments.end = ~uint64_t{0};
  for (size_t first = 0; first < copy.count; first += kPackBlocks) {
    const size_t last = std::min<size_t>(copy.count, first + kPackBlocks);
    arguments.block_count = static_cast<uint32_t>(last - first);
    for (size_t i = first; i < last; ++i) {
      arguments.blocks[i - first] = static_cast<int32_t>(copy.blocks[i]);
      arguments.slots[i - first] = static_cast<int32_t>(copy.slots[i]);
    }
    launch(arguments, kOverLink, kernels, stream);
  }
}

}  // namespace kvswap
