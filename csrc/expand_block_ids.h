#pragma once

#include <cstdint>

namespace kvswap {

// `out[i] = ids[j / factor] * factor + j % factor` with `j = i + skip`, for `count` outputs;
// the strides are in elements.
struct Expansion {
  const int64_t* ids;
  int64_t id_stride;
  int64_t factor;
  int64_t skip;
  int64_t count;
  int64_t* out;
  int64_t out_stride;
};

// Launches on `stream` of the device whose context is current; does not wait for it.
// There is at least one output.
void expand_block_ids_on_cuda(const Expansion& expansion, void* stream);

}  // namespace kvswap
