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
  bool host_source_any_order = false;  // host sources may be read before earlier work in the stream
};

// Copies on `stream`. Calls the driver once for up to batch_limit fragments, or once per fragment
// if it has no batch call, KVSWAP_BATCH=0 is set, there is one fragment, some memory is pageable or
// src_device is set. While the stream is being captured, records one graph node per fragment, and
// refuses pageable memory.
//
// A driver error names the call, the fragment's index, both addresses and the size. Copies
// submitted before the error still run; with `wait` they have ended when it is thrown.
void copy_batch(const FragmentList& fragments, const cuda::StreamRef& stream,
                const BatchOptions& options);

}  // namespace kvswap
