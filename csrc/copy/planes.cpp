#include "planes.h"

namespace kvswap {

void add_fragments(FragmentList& fragments, const BlockCopy& copy, PlaneRange planes) {
  const Planes& src = *copy.src;
  const Planes& dst = *copy.dst;
  uint64_t last_src = ~uint64_t{0}, last_dst = ~uint64_t{0};
  int64_t index = 0;
  for (size_t i = 0; i < copy.count; ++i) {
    for (size_t p = planes.begin; p < planes.end; ++p, ++index) {
      const bool merge = src.allocations[p] == last_src && dst.allocations[p] == last_dst;
      last_src = src.allocations[p];
      last_dst = dst.allocations[p];
      fragments.add({src.address(p, copy.src_blocks[i]), dst.address(p, copy.dst_blocks[i]),
                     src.sizes[p], index, copy.src_on_host},
                    merge);
    }
  }
}

}  // namespace kvswap
