#pragma once

#include "../cuda_driver.h"
#include "fragment.h"

namespace kvswap {

struct BatchOptions {
  int device = 0;                      // whose context and stream are used
  bool has_pageable = false;           // some address is pageable host memory
  int src_device = -1;                 // of the sources, where they lie on another GPU
  bool host_source_any_order = false;  // host sources may be read before earlier work in the stream
};

// Copies on `stream`, whose device's context is current: one driver call per KVSWAP_BATCH_LIMIT
// fragments (8,192 unless set) where the driver has the batch call and KVSWAP_BATCH is not 0, else
// a call per fragment. Returns before the bytes have landed, except with pageable memory, where it
// waits for the stream. While the stream is being captured, pinned and device memory are recorded
// as one graph node per fragment, and pageable memory is refused.
//
// A driver error names the call, the fragment's index, both addresses and the size; what was
// submitted before it may still be copied.
void copy_batch(const FragmentList& fragments, cuda::Stream stream, const BatchOptions& options);

}  // namespace kvswap
