#include "copy/slabs.h"

namespace kvswap {

void add_fragments(FragmentList& fragments, const BlockCopy& copy, PlaneRange planes) {
  const Planes& src = *copy.src;
  const Planes& dst = *copy.dst;
  uint64_t last_src = ~uint64_t{0}, last_dst = ~uint64_t{0};
  int64_t index = 0;
  for (size_t i = 0; i < copy.count; ++i) {
    bool in_chunk = i == 0 || (src.in_one_chunk(copy.src_blocks[i - 1], copy.src_blocks[i]) &&
                               dst.in_one_chunk(copy.dst_blocks[i - 1], copy.dst_blocks[i]));
    for (size_t p = planes.begin; p < planes.end; ++p, ++index) {
      const bool merge =
          in_chunk && src.allocations[p] == last_src && dst.allocations[p] == last_dst;
      in_chunk = true;  // as are all planes of a block
      last_src = src.allocations[p];
      last_dst = dst.allocations[p];
      fragments.add({src.address(p, copy.src_blocks[i]), dst.address(p, copy.dst_blocks[i]),
                     src.sizes[p], index, copy.src_on_host},
                    merge);
    }
  }
}

}  // namespace kvswap
