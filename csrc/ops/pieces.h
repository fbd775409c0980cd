#pragma once

#include "copy/address_map.h"
#include "ops/block_tensor.h"

namespace kvswap {

inline bool is_pageable(const BlockTensor& tensor, AddressMap& addresses) {
  return tensor.device < 0 && addresses.find(tensor.base).kind == MemoryKind::kPageable;
}

// Tells whether one copy of the driver may have two blocks: pinned memory may have been registered
// in pieces. No driver, no pieces.
class Pieces {
 public:
  Pieces(const BlockTensor& tensor, AddressMap* addresses)
      : tensor_(tensor), addresses_(addresses) {
    has_pieces_ = addresses != nullptr && tensor.device < 0 && !is_pageable(tensor, *addresses);
  }
  bool has_both(int64_t block, int64_t other) const {
    return !has_pieces_ || begin(block) == begin(other);
  }

 private:
  uint64_t begin(int64_t block) const { return addresses_->find(tensor_.address(block)).begin; }

  const BlockTensor& tensor_;
  AddressMap* addresses_;
  bool has_pieces_;
};

}  // namespace kvswap
