#include "calls.h"

namespace simulated {
namespace {

constexpr unsigned kDisableTiming = 2;

uint64_t number(const void* handle) { return reinterpret_cast<uint64_t>(handle); }

int create(void** handle, unsigned flags) {
  const Call call("cuEventCreate");
  if (call.result) return call.result;
  if (current_context() == kNoContext) return kInvalidContext;
  *handle = reinterpret_cast<void*>(device().create_event((flags & kDisableTiming) == 0));
  return kSuccess;
}

int destroy(void* handle) {
  const Call call("cuEventDestroy");
  return call.result ? call.result : device().destroy_event(number(handle));
}

int record(void* handle, void* stream_handle) {
  Call call("cuEventRecord");
  if (call.result) return call.result;
  const auto stream = call.stream(stream_handle);
  if (stream == nullptr) return call.result;
  const auto event = call.event(handle);
  if (event == nullptr) return call.result;
  if (event->device != stream->device) {
    device().log.violation("record of event ", event->number, " of GPU ", event->device,
                           " in a stream of GPU ", stream->device);
    return kInvalidHandle;
  }
  const uint64_t key = device().key(number(stream_handle));
  event->latest = std::make_shared<Record>(Record{key, stream->capturing});
  Operation operation{Operation::kRecord};
  operation.record = event->latest;
  operation.name = "record event " + std::to_string(event->number);
  device().log.add(operation.name, " on stream ", device().name(stream_handle));
  device().submit(*stream, std::move(operation));
  return kSuccess;
}

// CUDA takes an event that was never recorded for one that has happened.
bool was_recorded(const Event& event, const char* what) {
  if (event.latest != nullptr) return true;
  device().log.violation(what, " event ", event.number, ", which was never recorded");
  return false;
}

int wait(void* stream_handle, void* handle, unsigned) {
  Call call("cuStreamWaitEvent");
  if (call.result) return call.result;
  const auto stream = call.stream(stream_handle, true);
  if (stream == nullptr) return call.result;
  const auto event = call.event(handle);
  if (event == nullptr) return call.result;
  if (!was_recorded(*event, "wait for")) return kSuccess;
  if (stream->capturing && !event->latest->captured) return kCaptureIsolation;
  if (!device().waits_between_gpus && event->device != stream->device) return kSuccess;
  Operation operation{Operation::kWait};
  operation.record = event->latest;
  operation.name = "wait for event " + std::to_string(event->number);
  device().log.add(operation.name, " on stream ", device().name(stream_handle));
  device().submit(*stream, std::move(operation));
  return kSuccess;
}

int query(void* handle) {
  Call call("cuEventQuery");
  if (call.result) return call.result;
  const auto event = call.event(handle);
  if (event == nullptr) return call.result;
  if (!was_recorded(*event, "query of")) return kSuccess;
  return event->latest->happened ? kSuccess : kNotReady;
}

int elapsed(float* milliseconds, void* start_handle, void* end_handle) {
  const Call call("cuEventElapsedTime");
  if (call.result) return call.result;
  const auto start = device().event(number(start_handle));
  const auto end = device().event(number(end_handle));
  for (const auto& event : {start, end}) {
    if (event == nullptr || !event->timed || event->latest == nullptr) return kInvalidHandle;
  }
  if (start->device != end->device) return kInvalidHandle;
  if (!start->latest->happened || !end->latest->happened) return kNotReady;
  *milliseconds = static_cast<float>(end->latest->time - start->latest->time);
  return kSuccess;
}

}  // namespace

Functions event_calls() {
  return {
      SIMULATED(cuEventCreate, create), SIMULATED(cuEventDestroy, destroy),
      SIMULATED(cuEventRecord, record), SIMULATED(cuStreamWaitEvent, wait),
      SIMULATED(cuEventQuery, query),   SIMULATED(cuEventElapsedTime, elapsed),
  };
}

}  // namespace simulated
