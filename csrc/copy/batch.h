#pragma once

#include "copy/fragment.h"
#include "cuda/context.h"
#include "environment.h"

namespace kvswap {

struct BatchOptions {
  explicit BatchOptions(const Environment& environment = Environment())
      : environment(environment) {}

  Environment environment;
  int src_device = -1;                 // of the sources, if they are on another GPU
  bool has_pageable = false;           // some address is pageable host memory
  bool wait = false;                   // return only when the bytes were read and written
  bool one_call = false;               // no small calls first: earlier copies keep the link busy
  bool host_source_any_order = false;  // host sources may be read before earlier work in the stream
};

// Copies on `stream`: one driver call per batch_limit fragments where the driver has the batch call
// and it is on, else a call per fragment. While the stream is being captured, pinned and device
// memory are recorded as one graph node per fragment, and pageable memory is refused.
//
// A driver error names the call, the fragment's index, both addresses and the size; what was
// submitted before it may still be copied, with `wait` before the error is thrown.
void copy_batch(const FragmentList& fragments, const cuda::StreamRef& stream,
                const BatchOptions& options);

}  // namespace kvswap
