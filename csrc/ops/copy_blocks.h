#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "ops/block_tensor.h"

namespace kvswap {

// A list of block ids, and how a user names its entries.
struct IdList {
  const char* before;  // "block_mapping["
  const char* after;   // ", 1]"
  std::vector<int64_t> ids;

  std::string name(size_t i) const { return before + std::to_string(i) + after; }
};

// Block `src.ids[i]` becomes block `dst.ids[i]`.
struct BlockIds {
  IdList src;
  IdList dst;
};

// Copies blocks between each pair of tensors, after all checks: ids in range, no block written
// twice, no block read and written. Tensor semantics: on the current stream of the destination's
// device (else the source's), ordered after and before the other GPU's current stream where there
// are two, and done when it returns where a side is host memory, because compilers hand ops clones
// of host tensors that are freed or copied back at once.
void copy_blocks(const std::vector<BlockTensor>& src, const std::vector<BlockTensor>& dst,
                 const BlockIds& ids);

}  // namespace kvswap
