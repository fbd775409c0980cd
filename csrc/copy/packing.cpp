#include "copy/packing.h"

#include <limits>

#include "cuda/driver.h"

namespace kvswap {

PackTable::~PackTable() {
  if (address_ != 0) cuda::driver().free(address_);
}

bool has_kernel_ids(int64_t num_blocks, int64_t num_slots) {
  constexpr int64_t kMaxId = std::numeric_limits<int32_t>::max();
  return num_blocks <= kMaxId && num_slots <= kMaxId;
}

}  // namespace kvswap
