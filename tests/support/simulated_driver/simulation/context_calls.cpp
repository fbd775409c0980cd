#include <utility>

#include "calls.h"

namespace simulated {
namespace {

int get_error_name(int, const char** text) { return *text = "CUDA_ERROR_SIMULATED", kSuccess; }
int get_error_string(int, const char** text) {
  return *text = "made up by the simulated driver", kSuccess;
}

int get_version(int* version) {
  const Call call("cuDriverGetVersion");
  if (call.result == kSuccess) *version = 12080;
  return call.result;
}

int get_attribute(int* value, int attribute, int) {
  const Call call("cuDeviceGetAttribute");
  if (call.result == kSuccess) *value = device().attributes[attribute];
  return call.result;
}

int retain_primary_context(void** context, int ordinal) {
  const Call call("cuDevicePrimaryCtxRetain");
  if (call.result == kSuccess) *context = reinterpret_cast<void*>(uintptr_t(ordinal) + 1);
  return call.result;
}

int push_context(void* context) {
  const Call call("cuCtxPushCurrent");
  if (call.result) return call.result;
  contexts.push_back(static_cast<int>(reinterpret_cast<uintptr_t>(context)) - 1);
  device().log.add("push context of device ", contexts.back());
  return kSuccess;
}

int pop_context(void** context) {
  const Call call("cuCtxPopCurrent");
  if (call.result) return call.result;
  if (contexts.empty()) return kInvalidContext;
  *context = reinterpret_cast<void*>(uintptr_t(contexts.back()) + 1);
  contexts.pop_back();
  device().log.add("pop context");
  return kSuccess;
}

int exchange_capture_mode(int* mode) {
  const Call call("cuThreadExchangeStreamCaptureMode");
  if (call.result == kSuccess) std::swap(*mode, capture_mode);
  return call.result;
}

}  // namespace

Functions context_calls() {
  return {
      {"cuGetErrorName", reinterpret_cast<void*>(&get_error_name)},
      {"cuGetErrorString", reinterpret_cast<void*>(&get_error_string)},
      {"cuDriverGetVersion", reinterpret_cast<void*>(&get_version)},
      {"cuDeviceGetAttribute", reinterpret_cast<void*>(&get_attribute)},
      {"cuDevicePrimaryCtxRetain", reinterpret_cast<void*>(&retain_primary_context)},
      {"cuCtxPushCurrent", reinterpret_cast<void*>(&push_context)},
      {"cuCtxPopCurrent", reinterpret_cast<void*>(&pop_context)},
      {"cuThreadExchangeStreamCaptureMode", reinterpret_cast<void*>(&exchange_capture_mode)},
  };
}

}  // namespace simulated
