#pragma once

#include "cuda_driver.h"

// Owners of driver state, alive for one call.
namespace kvswap::cuda {

// The context that PyTorch and the CUDA runtime use on `device`.
Context primary_context(int device);

// Makes the primary context of `device` current and restores the caller's at the end. Neither
// PyTorch's current device nor that of the CUDA runtime is changed for the caller, and a thread
// that never used CUDA gets a context.
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
  int capture_mode_ = kCaptureRelaxed;
};

// Work submitted to `later` after this call starts when the work in `earlier` so far has ended.
// The current context must be that of the device of `earlier`.
void order_after(Stream earlier, Stream later);

// Runs `body`, which submits to `stream`, and lets `waiting` wait for what it submitted, also when
// it throws. The current context must be that of the device of `stream`.
template <typename Body>
void run_before(Stream stream, Stream waiting, const Body& body) {
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

// A stream of the library's own on `device`, whose context is current, for the calls that refuse
// the legacy default stream. It does not synchronise with that stream by itself and lives as long
// as the process.
Stream side_stream(int device);

bool is_capturing(Stream stream);

}  // namespace kvswap::cuda
