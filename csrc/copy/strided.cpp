#include "copy/strided.h"

#include "check.h"
#include "copy/address_map.h"

namespace kvswap {
namespace {

void fill(cuda::StridedSide& side, uint64_t address, uint64_t distance, uint64_t width,
          bool on_host) {
  const RowDistance rows = as_rows(distance, width);
  side.memory_type = on_host ? cuda::kHostMemory : cuda::kDeviceMemory;
  side.host = on_host ? reinterpret_cast<void*>(address) : nullptr;
  side.device = on_host ? 0 : address;
  side.pitch = rows.pitch;
  side.height = rows.height;
}

}  // namespace

void copy_strided(const BlockCopy& copy, const std::vector<SlabRun>& runs, cuda::Stream stream) {
  for (const SlabRun& run : runs) {
    const size_t s = run.first;
    const uint64_t size = copy.src->sizes[s];
    const bool alone = run.count == 1;
    const uint64_t src_distance = alone ? size : copy.src->distance_at(s);
    const uint64_t dst_distance = alone ? size : copy.dst->distance_at(s);
    cuda::StridedCopy arguments{};
    arguments.width = size;
    arguments.height = 1;
    arguments.depth = run.count;
    for (size_t i = 0; i < copy.count; ++i) {
      const uint64_t src = copy.src->address(s, copy.src_blocks[i]);
      const uint64_t dst = copy.dst->address(s, copy.dst_blocks[i]);
      fill(arguments.src, src, src_distance, size, copy.src_on_host);
      fill(arguments.dst, dst, dst_distance, size, !copy.src_on_host);
      const cuda::Result result = cuda::driver().copy_strided_async(&arguments, stream);
      if (result == cuda::kSuccess) continue;
      fail("cuMemcpy3DAsync failed at block ", i, " of ", copy.count, ", from ", hex(src), " to ",
           hex(dst), ", ", run.count, " slabs of ", size, " bytes: ", cuda::describe(result));
    }
  }
}

}  // namespace kvswap
