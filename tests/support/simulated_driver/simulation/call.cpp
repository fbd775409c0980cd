#include "call.h"

#include <set>

namespace simulated {
namespace {

bool spoils_a_global_capture(const std::string& name) {
  static const std::set<std::string> names = {
      "cuEventQuery",  "cuStreamQuery",     "cuStreamSynchronize", "cuMemHostAlloc",
      "cuMemFreeHost", "cuMemHostRegister", "cuMemHostUnregister",
  };
  return names.count(name) > 0;
}

}  // namespace

Call::Call(const char* name)
    : lock(device().mutex), result(device().faults.next(name, current_context())) {
  const std::string called(name);
  if (called == "cuStreamQuery") {
    ++queries_in_a_row;
  } else if (called.rfind("cuCtx", 0) != 0 && called.rfind("cuThread", 0) != 0) {
    queries_in_a_row = 0;
  }
  if (result != kSuccess) return;
  if (device().global_capture && capture_mode == 0 && spoils_a_global_capture(name)) {
    ++device().capture_spoilt;
    result = kCaptureUnsupported;
  }
  device().settle();
}

Call::~Call() {
  device().settle();
  device().changed.notify_all();  // there may be work for the thread
}

std::shared_ptr<Stream> Call::stream(const void* handle, bool asks) {
  const auto found = device().stream_in_context(reinterpret_cast<uint64_t>(handle), asks);
  if (found == nullptr) {
    result = current_context() == kNoContext ? kInvalidContext : kInvalidHandle;
    return nullptr;
  }
  result = device().faults.lost(found->device);
  return result == kSuccess ? found : nullptr;
}

std::shared_ptr<Event> Call::event(const void* handle) {
  const auto found = device().event(reinterpret_cast<uint64_t>(handle));
  result = found == nullptr ? kInvalidHandle : device().faults.lost(found->device);
  return result == kSuccess ? found : nullptr;
}

}  // namespace simulated
