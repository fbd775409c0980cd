#include "planes.h"

namespace kvswap {

void add_fragments(FragmentList& fragments, const BlockCopy& copy, PlaneRange planes) {
  const Planes& src = *copy.src;
  const Planes& dst = *copy.dst;
  uint64_t last_src = ~uint64_t{0}, last_dst = ~uint64_t{0};
  int64_t index = 0;
  for (size_t i = 0; i < copy.count; ++i) {
    const auto src_block = static_cast<uint64_t>(copy.src_blocks[i]);
    const auto dst_block = static_cast<uint64_t>(copy.dst_blocks[i]);
    for (size_t p = planes.begin; p < planes.end; ++p, ++index) {
      const bool merge = src.allocations[p] == last_src && dst.allocations[p] == last_dst;
      last_src = src.allocations[p];
      last_dst = dst.allocations[p];
      fragments.add(
          {src.bases[p] + src_block * src.strides[p], dst.bases[p] + dst_block * dst.strides[p],
           src.sizes[p], index, copy.src_on_host},
          merge);
    }
  }
}

}  // namespace kvswap
