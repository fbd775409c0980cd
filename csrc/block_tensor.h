#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "copy/fragment.h"

// The tensors and ids of the ops that copy blocks of tensors.
namespace kvswap {

using torch::stable::Tensor;

// A tensor seen as `count` blocks along dimension 0, `pitch` bytes apart. Each block is dense: its
// elements fill `bytes` bytes without gaps, in whatever order of dimensions.
struct BlockTensor {
  std::string name;  // "src[3]", for errors
  uint64_t base;
  int64_t count;
  uint64_t pitch;
  uint64_t bytes;
  int device;  // -1: host memory
  size_t element_bytes;
  std::vector<std::pair<int64_t, int64_t>> order;  // (size, stride) within a block

  BlockTensor(std::string name, const Tensor& tensor);

  uint64_t address(int64_t block) const { return base + static_cast<uint64_t>(block) * pitch; }
  uint64_t end() const { return count == 0 ? base : address(count - 1) + bytes; }
};

// Throws unless a block of `src` can become a block of `dst` byte by byte.
void check_same_block(const BlockTensor& src, const BlockTensor& dst);

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
