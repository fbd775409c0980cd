#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "ops/tensor_check.h"

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
  TensorDevice device;
  uint64_t offset;  // if `base` is no address: bytes from the begin of the storage to `base`
  std::vector<std::pair<int64_t, int64_t>> order;  // (size, stride) within a block

  BlockTensor(std::string name, const Tensor& tensor);

  uint64_t address(int64_t block) const { return base + static_cast<uint64_t>(block) * pitch; }
  uint64_t end() const { return count == 0 ? base : address(count - 1) + bytes; }
};

// Throws unless a block of `src` can become a block of `dst` byte by byte.
void check_same_block(const BlockTensor& src, const BlockTensor& dst);

}  // namespace kvswap
