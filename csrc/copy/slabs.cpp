#include "copy/slabs.h"

namespace kvswap {

uint32_t Slabs::alignment() const {
  uint64_t bits = 16;
  for (size_t s = 0; s < count(); ++s) bits |= bases[s] | strides[s] | sizes[s];
  return static_cast<uint32_t>(bits & -bits);
}

void add_fragments(FragmentList& fragments, const BlockCopy& copy, SlabRange slabs) {
  const Slabs& src = *copy.src;
  const Slabs& dst = *copy.dst;
  uint64_t last_src = ~uint64_t{0}, last_dst = ~uint64_t{0};
  int64_t index = 0;
  for (size_t i = 0; i < copy.count; ++i) {
    bool in_chunk = i == 0 || (src.in_one_chunk(copy.src_blocks[i - 1], copy.src_blocks[i]) &&
                               dst.in_one_chunk(copy.dst_blocks[i - 1], copy.dst_blocks[i]));
    for (size_t s = slabs.begin; s < slabs.end; ++s, ++index) {
      const bool merge =
          in_chunk && src.allocations[s] == last_src && dst.allocations[s] == last_dst;
      in_chunk = true;  // all slabs of a block are
      last_src = src.allocations[s];
      last_dst = dst.allocations[s];
      fragments.add({src.address(s, copy.src_blocks[i]), dst.address(s, copy.dst_blocks[i]),
                     src.sizes[s], index, copy.src_on_host},
                    merge);
    }
  }
}

}  // namespace kvswap
