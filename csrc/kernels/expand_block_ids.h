#pragma once

#include <cstdint>

namespace kvswap {

// Also the kernel's arguments: `out[i] = ids[j / factor] * factor + j % factor` with `j = i +
// skip`, for `count` outputs. Strides are in elements.
struct Expansion {
  const int64_t* ids;
  int64_t id_stride;
  int64_t factor;
  int64_t skip;
  int64_t count;
  int64_t* out;
  int64_t out_stride;
};

}  // namespace kvswap
