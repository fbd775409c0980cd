#pragma once

#include "cuda/driver.h"

// Contexts, streams and memory of the driver.
namespace kvswap::cuda {

// The context that PyTorch and the CUDA runtime use on `device`.
Context primary_context(int device);

// Makes the primary context of `device` current, also in a thread that never used CUDA, and
// restores the caller's context at the end. Does not change the current device of PyTorch or of the
// CUDA runtime. Within another guard for the same device it costs nothing.
//
// Puts the thread in relaxed capture mode: while another thread captures a CUDA graph in global
// mode, our calls, which concern our own streams, would otherwise invalidate that graph.
class ContextGuard {
 public:
  explicit ContextGuard(int device);
  ~ContextGuard();
  ContextGuard(const ContextGuard&) = delete;
  ContextGuard& operator=(const ContextGuard&) = delete;

 private:
  int outer_;  // the device of the guard around this one
  int capture_mode_ = kCaptureRelaxed;
};

// Makes copies between the memory of two GPUs direct. Throws where that is not possible: the driver
// would copy through the host, without a word.
void enable_peer_access(int device, int peer);

// A stream of the caller. The handle alone does not identify it: 0, 1 and 2 mean a default stream
// of the current context. So the functions below make its context current, and other calls of the
// driver need a guard for its device. The library's own streams are plain `Stream`s.
struct StreamRef {
  int device;
  Stream handle;
};

bool is_capturing(const StreamRef& stream);

// Records the event, of the stream's device, behind the work that the stream was given so far.
void record_event(Event event, const StreamRef& stream);

// Work given to `stream` from now on waits for the event, which may be of another device.
void wait_event(const StreamRef& stream, Event event);

// Work submitted to `later` after this call starts when the work in `earlier` so far has ended.
void order_after(const StreamRef& earlier, const StreamRef& later);

// Runs `body`, which submits to `stream`, and makes `waiting` wait for that work, also when it
// throws.
template <typename Body>
void run_before(const StreamRef& stream, const StreamRef& waiting, const Body& body) {
  try {
    body();
  } catch (...) {
    order_after(stream, waiting);
    throw;
  }
  order_after(stream, waiting);
}

// A stream of the current context that does not synchronise with the legacy default stream.
Stream create_stream();

// An event of the current context.
Event create_event(unsigned flags);

// Allocates memory of the current context with a copy of these bytes, for driver().free(). Copies
// on `stream` and waits for that. what: the bytes, for errors.
Address upload(const void* bytes, size_t count, Stream stream, const char* what);

// A stream of the library's own, for calls that refuse the legacy default stream of `device`. It
// does not synchronise with that stream by itself, and is never destroyed.
StreamRef side_stream(int device);

}  // namespace kvswap::cuda
