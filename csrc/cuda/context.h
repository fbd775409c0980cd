#pragma once

#include "cuda/driver.h"

// Owners of driver state, alive for one call.
namespace kvswap::cuda {

// The context that PyTorch and the CUDA runtime use on `device`.
Context primary_context(int device);

// Makes the primary context of `device` current and restores the caller's at the end. Neither
// PyTorch's current device nor that of the CUDA runtime is changed for the caller, and a thread
// that never used CUDA gets a context. Within another guard for the same device it costs nothing.
//
// Meanwhile the thread may make the calls that are forbidden while another thread captures a CUDA
// graph in global mode: ours concern streams of ours, and would otherwise spoil that graph.
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

// A stream of the caller's. Its handle alone does not name it: 0, 1 and 2 mean a default stream of
// whatever context is current. So the functions below make its context current, and calls of the
// driver need a guard for its device. Streams that this library has created are plain `Stream`s.
struct StreamRef {
  int device;
  Stream handle;
};

bool is_capturing(const StreamRef& stream);

// Work given to `stream` from now on waits for the event, which may be of another device.
void wait_event(const StreamRef& stream, Event event);

// Work submitted to `later` after this call starts when the work in `earlier` so far has ended.
void order_after(const StreamRef& earlier, const StreamRef& later);

// Runs `body`, which submits to `stream`, and lets `waiting` wait for what it submitted, also when
// it throws.
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

// A stream of the library's own for the calls that refuse the legacy default stream of `device`. It
// does not synchronise with that stream by itself and lives as long as the process.
StreamRef side_stream(int device);

}  // namespace kvswap::cuda
