#pragma once

#include "copy/fragment.h"
#include "cuda/context.h"

namespace kvswap {

// Fragments in one batch call. The link starts when the driver has read a whole call. And with more
// than about 100 fragments of 16 KiB or less, a call to the GPU takes up to 2.5 us for each instead
// of 0.9: calls of 32 load 8 blocks of 160 x 8 KiB, in tensors of their own, in 0.8 ms, and one
// call takes 2.9 ms. 64 blocks of 64 x 32 KiB: 4.4 and 6.6 ms (H200, driver 580).
constexpr size_t kBatchFragments = 32;

struct BatchOptions {
  int src_device = -1;                 // of the sources, if they are on another GPU
  bool has_pageable = false;           // some address is pageable host memory
  bool wait = false;                   // return only when the bytes were read and written
  bool host_source_any_order = false;  // host sources may be read before earlier work in the stream
};

// Copies on `stream`. Calls the driver once for up to kBatchFragments fragments, or once per
// fragment if it has no batch call, there is one fragment, some memory is pageable or src_device is
// set. While the stream is being captured, records one graph node per
// fragment, and refuses pageable memory.
//
// A driver error names the call, the fragment's index, both addresses and the size. Copies
// submitted before the error still run; with `wait` they have ended when it is thrown.
void copy_batch(const FragmentList& fragments, const cuda::StreamRef& stream,
                const BatchOptions& options);

}  // namespace kvswap
