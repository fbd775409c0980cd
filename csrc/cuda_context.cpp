#include "cuda_context.h"

#include <map>
#include <mutex>

#include "check.h"

namespace kvswap::cuda {
// Retained once and never released: the process uses the primary context until it ends.
Context primary_context(int device) {
  static std::mutex mutex;
  // Never destroyed: threads may still copy while the process exits.
  static auto& contexts = *new std::map<int, Context>;
  const std::lock_guard<std::mutex> lock(mutex);
  auto [entry, is_new] = contexts.try_emplace(device, nullptr);
  if (is_new) {
    const Result result = driver().retain_primary_context(&entry->second, device);
    if (result != kSuccess) contexts.erase(entry);
    KVSWAP_DRIVER_CHECK(result, "cuDevicePrimaryCtxRetain for CUDA device ", device);
  }
  return entry->second;
}

ContextGuard::ContextGuard(int device) {
  KVSWAP_DRIVER_CHECK(driver().push_context(primary_context(device)),
                      "cuCtxPushCurrent for CUDA device ", device);
  driver().exchange_capture_mode(&capture_mode_);  // fails for no value of ours
}

ContextGuard::~ContextGuard() {
  // A destructor must not throw; the pop fails only when the driver is gone, and with it the
  // context that it would restore.
  Context context;
  driver().exchange_capture_mode(&capture_mode_);
  driver().pop_context(&context);
}

void order_after(Stream earlier, Stream later) {
  Event event = nullptr;
  KVSWAP_DRIVER_CHECK(driver().create_event(&event, kEventDisableTiming), "cuEventCreate");
  Result result = driver().record_event(event, earlier);
  if (result == kSuccess) result = driver().wait_event(later, event, 0);
  // The driver keeps a destroyed event until the work that uses it has ended.
  const Result destroyed = driver().destroy_event(event);
  KVSWAP_DRIVER_CHECK(result, "ordering one stream after another");
  KVSWAP_DRIVER_CHECK(destroyed, "cuEventDestroy");
}

Stream create_stream() {
  // Kernels that pack run for microseconds, and would wait for those of an endless row of short
  // kernels beside them. The driver takes the nearest priority that it has; copies have none.
  constexpr int kMostUrgent = -100;
  Stream stream = nullptr;
  KVSWAP_DRIVER_CHECK(driver().create_stream(&stream, kStreamNonBlocking, kMostUrgent),
                      "cuStreamCreateWithPriority");
  return stream;
}

Stream side_stream(int device) {
  static std::mutex mutex;
  static auto& streams = *new std::map<int, Stream>;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto known = streams.find(device);
  if (known != streams.end()) return known->second;
  return streams[device] = create_stream();
}

bool is_capturing(Stream stream) {
  int status = 0;
  KVSWAP_DRIVER_CHECK(driver().is_capturing(stream, &status), "cuStreamIsCapturing");
  return status != 0;
}

}  // namespace kvswap::cuda
