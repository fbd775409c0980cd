#pragma once

#include <cstdint>

namespace kvswap {

// What the kernel is told, too: `out[i] = ids[j / factor] * factor + j % factor` with `j = i +
// skip`, for `count` outputs; the strides are in elements.
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
