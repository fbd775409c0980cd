#pragma once

#include <map>
#include <mutex>
#include <string>

#include "device.h"

namespace simulated {

using Functions = std::map<std::string, void*>;

// What cuThreadExchangeStreamCaptureMode exchanges: 0 global, 1 thread local, 2 relaxed.
inline thread_local int capture_mode = 0;

// Calls of cuStreamQuery by this thread since it made another call, those of contexts left out.
inline thread_local int queries_in_a_row = 0;

// A call of a driver function: has the lock, is counted, and fails if the test wants that.
class Call {
 public:
  explicit Call(const char* name);
  ~Call();
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  std::unique_lock<std::mutex> lock;
  int result;  // unless success, what the function returns at once

  // What a handle means, or null, and why: what the function returns.
  std::shared_ptr<Stream> stream(const void* handle, bool asks = false);
  std::shared_ptr<Event> event(const void* handle);
};

}  // namespace simulated
