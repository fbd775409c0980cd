#include <algorithm>
#include <utility>

#include "calls.h"

namespace simulated {
namespace {

bool is_device(int ordinal) { return ordinal >= 0 && ordinal < kDevices; }

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
  if (call.result) return call.result;
  if (!is_device(ordinal)) return kInvalidDevice;
  *context = reinterpret_cast<void*>(uintptr_t(ordinal) + 1);
  return kSuccess;
}

int can_access_peer(int* can, int ordinal, int peer) {
  const Call call("cuDeviceCanAccessPeer");
  if (call.result) return call.result;
  if (!is_device(ordinal) || !is_device(peer)) return kInvalidDevice;
  *can = ordinal != peer && !device().unreachable.count(std::minmax(ordinal, peer));
  return kSuccess;
}

int enable_peer_access(void* context, unsigned flags) {
  const Call call("cuCtxEnablePeerAccess");
  if (call.result) return call.result;
  const int ordinal = current_context(), peer = device_of(context);
  if (ordinal == kNoContext || !is_device(peer) || ordinal == peer) return kInvalidContext;
  if (flags != 0) return kInvalidValue;
  if (const int lost = device().faults.lost(peer)) return lost;
  if (device().unreachable.count(std::minmax(ordinal, peer))) return kPeerAccessUnsupported;
  if (!device().accesses.emplace(ordinal, peer).second) return kPeerAccessEnabled;
  device().log.add("enable access of GPU ", ordinal, " to GPU ", peer);
  return kSuccess;
}

int push_context(void* context) {
  const Call call("cuCtxPushCurrent");
  if (call.result) return call.result;
  contexts.push_back(device_of(context));
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
      SIMULATED(cuGetErrorName, get_error_name),
      SIMULATED(cuGetErrorString, get_error_string),
      SIMULATED(cuDriverGetVersion, get_version),
      SIMULATED(cuDeviceGetAttribute, get_attribute),
      SIMULATED(cuDevicePrimaryCtxRetain, retain_primary_context),
      SIMULATED(cuDeviceCanAccessPeer, can_access_peer),
      SIMULATED(cuCtxEnablePeerAccess, enable_peer_access),
      SIMULATED(cuCtxPushCurrent, push_context),
      SIMULATED(cuCtxPopCurrent, pop_context),
      SIMULATED(cuThreadExchangeStreamCaptureMode, exchange_capture_mode),
  };
}

}  // namespace simulated
