#include <algorithm>
#include <string>

#include "calls.h"

namespace simulated {
namespace {

constexpr int kStreamMemoryOperations = 122;  // CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS

uint64_t number(const void* handle) { return reinterpret_cast<uint64_t>(handle); }

int create(void** handle, unsigned, int priority) {
  constexpr int kMaxUrgent = -5;
  const Call call("cuStreamCreateWithPriority");
  if (call.result) return call.result;
  if (current_context() == kNoContext) return kInvalidContext;
  *handle = reinterpret_cast<void*>(device().create_stream());
  const std::string urgency =
      priority < 0 ? ", of priority " + std::to_string(std::max(priority, kMaxUrgent)) : "";
  device().log.add("create stream ", device().name(*handle), urgency);
  return kSuccess;
}

int destroy(void* handle) {
  const Call call("cuStreamDestroy");
  if (call.result) return call.result;
  device().log.add("destroy stream ", device().name(handle));
  return device().destroy_stream(number(handle));
}

int is_capturing(void* handle, int* status) {
  Call call("cuStreamIsCapturing");
  if (call.result) return call.result;
  const auto stream = call.stream(handle);
  if (stream == nullptr) return call.result;
  *status = stream->capturing;
  return kSuccess;
}

int query(void* handle) {
  Call call("cuStreamQuery");
  if (call.result) return call.result;
  const auto stream = call.stream(handle, true);
  if (stream == nullptr) return call.result;
  if (stream->capturing) return ++device().capture_spoilt, kCaptureUnsupported;
  // A thread that asks in a loop waits, as if it synchronised.
  constexpr int kLoop = 64;
  if (queries_in_a_row > kLoop) device().go_on(device().key(reinterpret_cast<uint64_t>(handle)));
  return stream->queue.empty() ? kSuccess : kNotReady;
}

int synchronize(void* handle) {
  Call call("cuStreamSynchronize");
  if (call.result) return call.result;
  const auto stream = call.stream(handle, true);
  if (stream == nullptr) return call.result;
  const std::string what = "synchronize stream " + device().name(handle);
  device().log.add(what);
  if (stream->capturing) return ++device().capture_spoilt, kCaptureUnsupported;
  const uint64_t last = stream->submitted;
  return device().wait(call.lock, what, stream->device, device().key(number(handle)),
                       [&] { return stream->ended >= last; });
}

// Checks what the two calls with a value need, and submits it.
int push(const char* name, void* handle, Operation operation) {
  Call call(name);
  if (call.result) return call.result;
  const auto stream = call.stream(handle);
  if (stream == nullptr) return call.result;
  if (!device().attributes[kStreamMemoryOperations]) return kNotSupported;
  if (device().memory.find(operation.address).type == 0) return kInvalidValue;
  device().log.add(operation.name, " on stream ", device().name(handle));
  device().submit(*stream, std::move(operation));
  return kSuccess;
}

int wait_value(void* handle, unsigned long long address, uint64_t value, unsigned flags) {
  if (!device().waits_between_gpus) return kSuccess;
  if (flags != 0) return kInvalidValue;  // 0 is "at least"
  Operation operation{Operation::kWaitValue};
  operation.address = address;
  operation.value = value;
  operation.name = "wait for a value of at least " + std::to_string(value);
  return push("cuStreamWaitValue64", handle, std::move(operation));
}

int write_value(void* handle, unsigned long long address, uint64_t value, unsigned) {
  Operation operation{Operation::kWriteValue};
  operation.address = address;
  operation.value = value;
  operation.name = "write value " + std::to_string(value);
  return push("cuStreamWriteValue64", handle, std::move(operation));
}

}  // namespace

Functions stream_calls() {
  return {
      SIMULATED(cuStreamCreateWithPriority, create), SIMULATED(cuStreamDestroy, destroy),
      SIMULATED(cuStreamIsCapturing, is_capturing),  SIMULATED(cuStreamQuery, query),
      SIMULATED(cuStreamSynchronize, synchronize),   SIMULATED(cuStreamWaitValue64, wait_value),
      SIMULATED(cuStreamWriteValue64, write_value),
  };
}

}  // namespace simulated
